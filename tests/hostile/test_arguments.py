"""Every public function and every command, with arguments that mean nothing: one line of ours, never
another library's exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import kvbridge
from kvbridge import FitConfig, KVSnapshot, RepairPlan, Stream
from kvbridge.cli.main import app
from kvbridge.errors import KVBridgeError
from tests.hostile.forge import saved
from tests.models import TEXT, tiny, tiny_causal, tiny_tokenizer

PROMPT = TEXT[:130]


class Odd:
    """Of no type that anything expects."""

    def __repr__(self) -> str:
        return "odd\nodd"


HOSTILE: dict[str, Any] = {
    "none": None,
    "empty": "",
    "surrogate": "half an emoji \ud83d",
    "zero": "a\0b",
    "bytes": b"text",
    "int": 3,
    "negative": -7,
    "huge": 10**30,
    "float": 0.5,
    "nan": float("nan"),
    "true": True,
    "list": [],
    "ints": [1, 2, 3],
    "beyond": [1, 10**9],
    "below": [-1, 2],
    "nested": [[1], [2]],
    "words": ["a", None],
    "dict": {"a": 1},
    "tuple": (1, "a"),
    "floats": torch.tensor([0.5, 1.5]),
    "scalar": torch.tensor(3),
    "beyond_tensor": torch.tensor([1, 10**9]),
    "below_tensor": torch.tensor([-3, 1]),
    "two_rows": torch.ones(2, 3, dtype=torch.int64),
    "meta": torch.ones(3, dtype=torch.int64, device="meta"),
    "bools": torch.tensor([True]),
    "function": print,
    "class": dict,
    "odd": Odd(),
    "path": Path("/nowhere/at/all"),
    "device": "cuda:99",
    "dtype": torch.int8,
}


@cache
def parts() -> dict[str, Any]:
    model = tiny("llama")
    snapshot = kvbridge.capture(model, PROMPT)
    bridge = kvbridge.Bridge(None, sender=model, receiver=model)
    return {
        "model": model,
        "snapshot": snapshot,
        "bridge": bridge,
        "handoff": bridge.handoff(snapshot, PROMPT),
    }


Call = tuple[Callable[..., Any], dict[str, Any]]


def calls(folder: Path) -> dict[str, Call]:
    """By name: a public function, and arguments that it takes."""
    at = parts()
    model, snapshot, bridge, handoff = (
        at[name] for name in ("model", "snapshot", "bridge", "handoff")
    )
    asset = kvbridge.load_asset(saved(folder / "asset"))
    file = folder / "snapshot.safetensors"
    snapshot.save(file)
    ids = snapshot.token_ids
    stored = {"path": folder / "asset"}
    return {
        "Asset": (
            kvbridge.Asset,
            {
                "path": folder,
                "digest": "",
                "manifest": asset.manifest,
                "translator": asset.translator,
            },
        ),
        "Bridge": (
            kvbridge.Bridge,
            {
                "asset": None,
                "sender": model,
                "receiver": model,
                "gate": None,
                "ledger": None,
                "min_exact_share": 0.5,
            },
        ),
        "Bridge.handoff": (
            bridge.handoff,
            {"snapshot": snapshot, "text": PROMPT, "repair": RepairPlan(), "known": None},
        ),
        "Bridge.handoff.input_ids": (bridge.handoff, {"snapshot": snapshot, "input_ids": ids}),
        "Bridge.handoff.messages": (
            bridge.handoff,
            {
                "snapshot": snapshot,
                "messages": [{"role": "user", "content": "x"}],
                "template": None,
            },
        ),
        "Bridge.handoff_many": (bridge.handoff_many, {"requests": [(snapshot, PROMPT)]}),
        "Decision": (
            kvbridge.Decision,
            {"verdict": "use", "reason": "exact", "detail": "", "score": 0.5},
        ),
        "FitConfig": (
            FitConfig,
            {name: field.default for name, field in FitConfig.__dataclass_fields__.items()},
        ),
        "Handoff.generate": (handoff.generate, {"max_new_tokens": 2, "do_sample": False}),
        "Handoff.text": (handoff.text, {"max_new_tokens": 2, "num_beams": 2}),
        "KVSnapshot.from_cache": (
            KVSnapshot.from_cache,
            {
                "cache": handoff.cache,
                "model": model,
                "input_ids": handoff.ids,
                "text": None,
                "attention_mask": None,
                "position_ids": None,
                "provenance": None,
            },
        ),
        "KVSnapshot.load": (KVSnapshot.load, {"path": file}),
        "KVSnapshot.save": (snapshot.save, {"path": folder / "again.safetensors"}),
        "KVSnapshot.to_cache": (snapshot.to_cache, {"model": model}),
        "Model.encode": (model.encode, {"text": PROMPT}),
        "Model.encode_ids": (model.encode_ids, {"token_ids": ids}),
        "Model.render": (
            model.render,
            {"messages": [{"role": "user", "content": "x"}], "template": None},
        ),
        "Provenance.at": (snapshot.provenance.at, {"layer": 0, "token": 0}),
        "RepairPlan": (RepairPlan, {"sinks": 1, "tail": 1, "layers": 1, "tokens": (3,)}),
        "Stream": (Stream, {"name": "k", "heads": 2, "width": 16, "rotated": True}),
        "capture": (kvbridge.capture, {"model": model, "text": PROMPT}),
        "capture.input_ids": (kvbridge.capture, {"model": model, "input_ids": ids}),
        "capture.messages": (
            kvbridge.capture,
            {"model": model, "messages": [{"role": "user", "content": "x"}], "template": None},
        ),
        "fit": (
            kvbridge.fit,
            {
                "sender": model,
                "receiver": tiny("llama", 1),
                "texts": [],
                "config": FitConfig(),
                "device": "cpu",
            },
        ),
        "generate_many": (kvbridge.generate_many, {"handoffs": [handoff], "max_new_tokens": 2}),
        "load": (
            kvbridge.load,
            {
                "source": "demo:nothing",
                "revision": None,
                "dtype": None,
                "device": "cpu",
                "adapter": None,
                "trust_remote_code": False,
            },
        ),
        "load_asset": (kvbridge.load_asset, stored),
        "load_controls": (kvbridge.load_controls, {"asset": asset, "path": folder / "none"}),
        "save_asset": (kvbridge.save_asset, {"fit": None, "path": folder / "new"}),
        "wrap": (
            kvbridge.wrap,
            {"model": tiny_causal("llama"), "tokenizer": tiny_tokenizer(), "name": "x"},
        ),
    }


RESULTS = {
    "Evidence",
    "Fit",
    "Handoff",
    "KVBridgeError",
    "KVGeometry",
    "KVSnapshot",
    "Model",
    "Provenance",
    "Rotation",
    "Translator",
}
"""What kvbridge gives back: nobody builds one by hand, but their functions are called."""
NAMES = [
    "Asset",
    "Bridge",
    "Bridge.handoff",
    "Bridge.handoff.input_ids",
    "Bridge.handoff.messages",
    "Bridge.handoff_many",
    "Decision",
    "FitConfig",
    "Handoff.generate",
    "Handoff.text",
    "KVSnapshot.from_cache",
    "KVSnapshot.load",
    "KVSnapshot.save",
    "KVSnapshot.to_cache",
    "Model.encode",
    "Model.encode_ids",
    "Model.render",
    "Provenance.at",
    "RepairPlan",
    "Stream",
    "capture",
    "capture.input_ids",
    "capture.messages",
    "fit",
    "generate_many",
    "load",
    "load_asset",
    "load_controls",
    "save_asset",
    "wrap",
]


def test_every_public_name_is_walked():
    walked = {name.partition(".")[0] for name in NAMES}
    assert set(kvbridge.__all__) <= walked | RESULTS


@pytest.mark.parametrize("name", NAMES)
def test_public_functions(name, tmp_path, monkeypatch):
    """One argument after the other is replaced; the call may succeed."""
    monkeypatch.chdir(tmp_path)
    every = calls(tmp_path)
    assert list(every) == NAMES
    function, sound = every[name]
    wrong = []
    for argument in sound:
        for kind, value in HOSTILE.items():
            try:
                function(**{**sound, argument: value})
            except KVBridgeError as refusal:
                if "\n" in str(refusal):
                    wrong.append(f"{argument}={kind}: several lines: {refusal}")
            except Exception as foreign:  # noqa: BLE001 - that there is none is what is tested
                wrong.append(f"{argument}={kind}: {type(foreign).__name__}: {foreign}"[:160])
    assert not wrong, "\n".join(wrong)


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command under a group, with its words."""
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, word))
        else:
            yield (*path, word), command


COMMANDS = dict(commands(typer.main.get_command(app)))
WORDS = (
    "",
    "nothing",
    "../..",
    "-7",
    "10000000000000000000000",
    "nan",
    "[x]",
    "\N{CROSS MARK}",
    "a,b",
    "cuda:99",
)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands(words, tmp_path, monkeypatch):
    """Each option and argument with each word, the others as far as they are required: an exit code
    of 1 or 2 and no traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command = COMMANDS[words]
    wrong = []
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.is_flag]
    tries = [(list(words), [word] * len(arguments)) for word in WORDS]
    if not arguments:
        # Nothing has to be given: these would run.
        tries, options = [], [o for o in options if o.bare_type is int]
    for option in options:
        for word in WORDS if arguments else ("", "-7", "nan", "[x]"):
            line = [*words, option.opts[0], word]
            tries.append((line, ["nowhere"] * sum(a.required for a in arguments)))
    for line, given in tries:
        result = CliRunner().invoke(app, [*line, *given])
        failure = result.exception
        if isinstance(failure, (SystemExit, KVBridgeError, OSError)) or failure is None:
            if failure is not None and "\n" in str(failure):
                wrong.append(f"{line}: several lines: {failure}")
            continue
        wrong.append(f"{line}: {type(failure).__name__}: {failure}"[:160])
    assert not wrong, "\n".join(wrong)


def test_autocast_is_refused_by_name():
    at = parts()
    for name, call in {
        "capture": lambda: kvbridge.capture(at["model"], PROMPT),
        "handoff": lambda: at["bridge"].handoff(at["snapshot"], PROMPT),
        "generate": lambda: at["handoff"].generate(2),
        "wrap": lambda: kvbridge.wrap(tiny_causal("llama"), tiny_tokenizer()),
    }.items():
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(KVBridgeError, match=r"no torch\.autocast"),
        ):
            call()
        assert call() is not None, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_default_dtype_changes_nothing(dtype):
    model = tiny("llama")
    expected = parts()["handoff"].generate(8, do_sample=False)
    torch.set_default_dtype(dtype)
    try:
        part = kvbridge.capture(model, PROMPT[:60])
        handoff = parts()["bridge"].handoff(part, PROMPT)
        assert torch.equal(handoff.generate(8, do_sample=False), expected)
        assert kvbridge.wrap(model.model, model.tokenizer).geometry.digest == (
            kvbridge.wrap(model.model, model.tokenizer).geometry.digest
        )
    finally:
        torch.set_default_dtype(torch.float32)


def test_inference_mode_inside_and_outside():
    expected = parts()["handoff"].generate(8, do_sample=False)
    with torch.inference_mode():
        model = kvbridge.wrap(tiny_causal("llama"), tiny_tokenizer())
        part = kvbridge.capture(model, PROMPT[:60])
        inside = kvbridge.Bridge(None, sender=model, receiver=model).handoff(part, PROMPT)
        assert torch.equal(inside.generate(8, do_sample=False), expected)
    outside = kvbridge.Bridge(None, sender=model, receiver=model).handoff(part, PROMPT)
    for handoff in (inside, outside):
        assert torch.equal(handoff.generate(8, do_sample=False), expected)


def test_a_list_of_ids_is_taken():
    model = tiny("llama")
    ids = model.encode(PROMPT).ids
    snapshot = kvbridge.capture(model, input_ids=ids.tolist())
    assert torch.equal(snapshot.token_ids, ids)
    handoff = parts()["bridge"].handoff(snapshot, input_ids=[ids.tolist()])
    assert handoff.decision.reason == "exact"
