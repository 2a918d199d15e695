"""`--dtype` and adapters on every command that loads a model, and what is said where an asset was
fitted with others."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import kvbridge
from kvbridge.asset.folder import load_asset
from kvbridge.cli import models as cli_models
from kvbridge.cli.main import app, main
from kvbridge.cli.models import loaded, models_of
from kvbridge.cli.options import ModelOptions, adapters_in
from kvbridge.errors import CorruptFile, UsageError
from kvbridge.eval.pair import fitted_asset
from kvbridge.eval.run.workers import Source
from kvbridge.geometry import difference
from recipes.thirdparty.__main__ import app as thirdparty
from tests.e2e.test_cli import few
from tests.eval.conftest import demo_asset, demo_data
from tests.models import TEXT, tiny_causal, tiny_tokenizer

__all__ = ["demo_asset", "demo_data"]

LOADING = ("fit", "screen", "eval run", "gate calibrate", "gate time")


def options(command: Any, words: str) -> set[str]:
    for word in words.split():
        command = command.commands[word]
    return {name for parameter in command.params for name in parameter.opts}


@pytest.mark.parametrize("words", LOADING)
def test_every_command_that_loads_a_model_takes_both(words: str) -> None:
    names = options(typer.main.get_command(app), words)
    adapters = {"--adapter"} if words == "screen" else {"--sender-adapter", "--receiver-adapter"}
    assert {"--dtype", *adapters} <= names
    assert {"--dtype", "--sender-adapter", "--receiver-adapter"} <= options(
        typer.main.get_command(thirdparty), "run"
    )


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A llama in bfloat16 and a qwen3 in float32, on disk."""
    folder = tmp_path_factory.mktemp("stored")
    for kind, dtype in (("llama", torch.bfloat16), ("qwen3", torch.float32)):
        tiny_causal(kind, dtype=dtype).save_pretrained(folder / kind)
        tiny_tokenizer().save_pretrained(folder / kind)
    return {kind: str(folder / kind) for kind in ("llama", "qwen3")}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, ["float32", "float32"]),
        ("float32", ["float32", "float32"]),
        ("bfloat16", ["bfloat16", "bfloat16"]),
        ("float16", ["float16", "float16"]),
        ("auto", ["bfloat16", "float32"]),
    ],
)
def test_models_are_loaded_in_the_dtype_that_is_asked_for(
    asked: str | None, expected: list[str], stored: dict[str, str]
) -> None:
    names = (stored["llama"], stored["qwen3"])
    models = loaded(ModelOptions(names, dtype=asked))
    assert [model.geometry.dtype for model in models] == expected
    again = [Source.of(model).load() for model in models]
    assert [m.geometry.digest for m in again] == [m.geometry.digest for m in models]


def test_a_fit_and_an_evaluation_in_bfloat16(tmp_path: Path) -> None:
    """On two processes, whose models are in that dtype, too; without --dtype the asset's."""
    data, out = few(tmp_path / "data", documents=40), tmp_path / "asset"
    fit = ("fit", "demo:sender", "demo:receiver", "--data", data, "--out", out, "--layers", 2)
    kvbridge_command(*fit, "--max-tokens", 64, "--dtype", "bfloat16")
    manifest = load_asset(out).manifest
    assert (manifest.sender.dtype, manifest.receiver.dtype) == ("bfloat16", "bfloat16")
    run = ("eval", "run", out, "--limit", 4, "--tasks", "recall", "--processes", 2)
    kvbridge_command(*run, "--out", tmp_path / "run", "--conditions", "native,translated")
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    assert {row["status"] for row in rows} == {"ok"}
    said = kvbridge_command(*run, "--out", tmp_path / "x", "--dtype", "float32", code=2)
    assert "was fitted with bfloat16 models; load them with --dtype bfloat16" in said


def kvbridge_command(*arguments: object, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvbridge.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == code, done.stderr[-2000:]
    return done.stderr


@pytest.mark.parametrize("command", ["eval run", "gate calibrate", "gate time"])
def test_another_dtype_than_the_asset_s_is_refused_before_loading(
    command: str, demo_asset: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def forbidden(*arguments: Any, **options: Any) -> Any:
        pytest.fail("a model was loaded first")

    monkeypatch.setattr(kvbridge, "load", forbidden)
    if command == "gate time":
        monkeypatch.setattr("kvbridge.cli.calibrate.load_calibration", lambda *_: None)
        monkeypatch.setattr("kvbridge.cli.calibrate.calibration_of", lambda *_: None)
    out = () if command == "gate time" else ("--out", str(tmp_path / "x"))
    arguments = ["kvbridge", *command.split(), str(demo_asset), *out, "--dtype", "bfloat16"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "was fitted with float32 models; load them with --dtype float32" in line


def test_a_dtype_that_is_none_is_a_usage_error() -> None:
    for words in LOADING:
        arguments = ("a", "b", "--out", "x") if words in ("fit", "screen") else ("a",)
        said = kvbridge_command(*words.split(), *arguments, "--dtype", "int8", code=2)
        assert "bfloat16" in said


@pytest.fixture(scope="module")
def pair(stored: dict[str, str]) -> tuple[Any, ...]:
    return tuple(kvbridge.load(stored[kind]) for kind in ("qwen3", "llama"))


def test_a_handoff_says_which_dtype_it_wants(pair: Any, stored: dict[str, str]) -> None:
    """bfloat16 loaded as float32 has the same weights, float32 as bfloat16 has not: both are named
    by their dtype, and so is a snapshot of the other."""
    for kind, model in zip(("qwen3", "llama"), pair, strict=True):
        narrow = kvbridge.load(stored[kind], dtype=torch.bfloat16)
        for expected, found in ((model, narrow), (narrow, model)):
            words = difference(expected.geometry, found.geometry)
            assert words.startswith(f"is loaded as {found.geometry.dtype}, not as ")
            assert "digest" not in words
            bridge = kvbridge.Bridge(None, sender=found, receiver=found)
            decision = bridge.handoff(kvbridge.capture(expected, TEXT), TEXT).decision
            assert decision.reason == "wrong_pair"
            assert f"--dtype {expected.geometry.dtype}" in decision.detail


def test_a_wrapped_model_says_that_it_is_hashed_otherwise(pair: Any) -> None:
    """The checkpoint is bfloat16, the live model float32: `load` hashes the one, `wrap` the
    other."""
    _, llama = pair
    wrapped = kvbridge.wrap(llama.model, llama.tokenizer, name=llama.name)
    words = difference(llama.geometry, wrapped.geometry)
    assert "`load` hashes a checkpoint as it is stored and `wrap` a model as it stands" in words
    same = kvbridge.wrap(pair[0].model, pair[0].tokenizer, name=pair[0].name)
    assert same.geometry.digest == pair[0].geometry.digest


def test_other_differences_keep_their_names(pair: Any) -> None:
    geometry = pair[0].geometry
    assert difference(geometry, replace(geometry, vocabulary=7, tokenizer_digest="t")) == (
        "differs in vocabulary, tokenizer_digest"
    )
    assert difference(geometry, replace(geometry, dtype="float16", config_digest="c")) == (
        "differs in dtype, config_digest"
    )
    assert difference(geometry, replace(geometry, adapters=("a@1",), weights_digest="w")) == (
        "has other adapters: a@1, not none"
    )


def test_a_run_folder_with_an_asset_of_another_dtype(demo_asset: Path, tmp_path: Path) -> None:
    (tmp_path / "asset").symlink_to(demo_asset)
    sender, receiver = loaded(ModelOptions(("demo:sender", "demo:receiver"), dtype="bfloat16"))
    config = kvbridge.FitConfig()
    with pytest.raises(CorruptFile, match="is loaded as bfloat16, not as float32: load it with"):
        fitted_asset(sender, receiver, [], tmp_path, config, say=print)


class Manifest:
    """Of an asset that was fitted with these two models."""

    def __init__(self, sender: Any, receiver: Any) -> None:
        self.sender, self.receiver = sender, receiver


class FakeAsset:
    path = Path("asset")

    def __init__(self, sender: Any, receiver: Any) -> None:
        self.manifest = Manifest(sender, receiver)


def test_an_asset_of_two_dtypes(pair: Any, stored: dict[str, str]) -> None:
    narrow = kvbridge.load(stored["llama"], dtype=torch.bfloat16)
    asset: Any = FakeAsset(pair[0].geometry, narrow.geometry)
    for dtype in (None, "auto"):
        again = models_of(asset, ModelOptions(dtype=dtype))
        assert [m.geometry.dtype for m in again] == ["float32", "bfloat16"]
    with pytest.raises(UsageError, match="a float32 sender and a bfloat16 receiver; load them wit"):
        models_of(asset, ModelOptions(dtype="float32"))


def test_adapters_are_asked_for_and_refused_by_name(pair: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("kvbridge.cli.checks.find_spec", lambda name: name)
    geometry = pair[0].geometry
    tuned = replace(geometry, adapters=("default@12ab",))
    with pytest.raises(
        UsageError, match="default@12ab in its receiver; give its folder with --rec"
    ):
        models_of(FakeAsset(geometry, tuned), ModelOptions())  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match="without an adapter in its sender; leave --sender-adapter"
    ):
        models_of(
            FakeAsset(geometry, geometry),  # type: ignore[arg-type]
            ModelOptions(adapters=("org/lora", None)),
        )


def test_an_adapter_is_checked_before_a_model_is_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    asked = ModelOptions(("demo:sender", "demo:receiver"), (str(tmp_path), None))
    monkeypatch.setattr(kvbridge, "load", None)
    monkeypatch.setattr("kvbridge.cli.checks.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs the package peft"):
        loaded(asked)
    monkeypatch.setattr("kvbridge.cli.checks.find_spec", lambda name: name)
    with pytest.raises(UsageError, match=r"no adapter_config\.json stands in this folder"):
        loaded(asked)


def test_adapters_of_a_fleet() -> None:
    models = ("demo:sender", "a=b")
    assert adapters_in([], models) == (None, None)
    assert adapters_in(["a=b=lora", "demo:sender=org/x"], models) == ("org/x", "lora")
    for given in (["lora"], ["demo:receiver=lora"], ["demo:sender="], ["a=b=x", "a=b=y"]):
        with pytest.raises(UsageError):
            adapters_in(given, models)


def test_adapters_reach_the_models_and_the_workers(tmp_path: Path, monkeypatch: Any) -> None:
    given: list[Any] = []

    def load(name: str, **options: Any) -> Any:
        given.append((name, options["adapter"]))
        return name

    monkeypatch.setattr(cli_models, "check_models", lambda asked: None)
    monkeypatch.setattr(kvbridge, "load", load)
    loaded(ModelOptions(("a", "b"), (None, "lora")))
    assert given == [("a", None), ("b", "lora")]


def test_a_real_adapter(stored: dict[str, str], tmp_path: Path) -> None:
    """Loaded with its model: other weights, its name in the geometry, and the same in a worker."""
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(
        tiny_causal("qwen3"), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    tuned.save_pretrained(tmp_path / "lora")
    names = (stored["qwen3"], stored["qwen3"])
    asked = ModelOptions(names, (None, str(tmp_path / "lora")), dtype="float32")
    plain, adapted = loaded(asked)
    assert adapted.adapter == str(tmp_path / "lora")
    assert adapted.geometry.weights_digest != plain.geometry.weights_digest
    assert difference(plain.geometry, adapted.geometry).startswith("has other adapters: default@")
    assert Source.of(adapted).load().geometry.digest == adapted.geometry.digest
    asset: Any = FakeAsset(plain.geometry, adapted.geometry)
    again = models_of(asset, replace(asked, names=(None, None), dtype=None))
    assert again[1].geometry.digest == adapted.geometry.digest
