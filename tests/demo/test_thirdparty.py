"""The third-party pair: fetching, joining and converting, all without a network."""

import hashlib
import io
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbridge.cli.ending import run_to_the_end
from kvbridge.errors import AlreadyExists, CorruptFile, DataError, LoadError
from recipes.thirdparty import fetch as thirdparty_fetch
from recipes.thirdparty import models as thirdparty_models
from recipes.thirdparty import pair as thirdparty
from recipes.thirdparty.__main__ import app
from recipes.thirdparty.fetch import Wheel, extract, fetch_deb, fetch_wheel, join


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_join_writes_the_members_in_order(tmp_path):
    first = archive(tmp_path / "1.whl", {"a/part00": b"hello "})
    second = archive(tmp_path / "2.whl", {"b/part01": b"world"})
    join([(first, "a/part00"), (second, "b/part01")], tmp_path / "whole", digest(b"hello world"))
    assert (tmp_path / "whole").read_bytes() == b"hello world"


def test_join_leaves_nothing_when_the_digest_is_wrong(tmp_path):
    first = archive(tmp_path / "1.whl", {"a": b"hello"})
    second = archive(tmp_path / "2.whl", {"b": b"world"})
    with pytest.raises(CorruptFile, match="joined of 2 parts"):
        join([(second, "b"), (first, "a")], tmp_path / "whole", digest(b"helloworld"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.whl", "2.whl"]


@pytest.mark.parametrize(
    "name", ["../outside", "a/../../outside", "/etc/outside", "C:\\outside", "a\\..\\b"]
)
def test_an_archive_with_a_name_that_leads_out_is_refused_whole(tmp_path, name):
    path = archive(tmp_path / "1.whl", {"wanted": b"data", name: b"evil"})
    with pytest.raises(CorruptFile, match="leads out of the archive"):
        extract(path, "wanted", io.BytesIO())


@pytest.mark.parametrize("content", [b"not a zip file", None])
def test_a_broken_archive_or_a_missing_member_is_a_corrupt_file(tmp_path, content):
    path = tmp_path / "1.whl"
    if content is None:
        archive(path, {"other": b""})
    else:
        path.write_bytes(content)
    with pytest.raises(CorruptFile, match="wanted"):
        extract(path, "wanted", io.BytesIO())


def fake_pip(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Replaces ``python -m pip`` by a script; sys.argv[1] is the folder to download to."""
    original = thirdparty_fetch.subprocess.run

    def run(command, **options):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        return original([sys.executable, "-c", script, command[command.index("-d") + 1]], **options)

    monkeypatch.setattr(thirdparty_fetch.subprocess, "run", run)


DOWNLOAD = (
    "import sys; open(sys.argv[1] + '/some_pkg-1.0-py3-none-any.whl', 'wb').write(b'content')"
)


def test_a_wheel_is_fetched_once_and_verified_every_time(tmp_path, monkeypatch):
    wheel = Wheel("some-pkg", "1.0", digest(b"content"))
    fake_pip(monkeypatch, DOWNLOAD)
    path = fetch_wheel(wheel, tmp_path)
    assert [path] == list(tmp_path.iterdir())
    fake_pip(monkeypatch, "raise SystemExit('pip should not run again')")
    assert fetch_wheel(wheel, tmp_path).read_bytes() == b"content"
    path.write_bytes(b"changed")
    with pytest.raises(
        CorruptFile, match=f"should have the SHA-256 {wheel.sha256}, but has {digest(b'changed')}"
    ):
        fetch_wheel(wheel, tmp_path)


def test_a_wheel_of_another_digest_is_not_kept(tmp_path, monkeypatch):
    fake_pip(monkeypatch, DOWNLOAD)
    with pytest.raises(CorruptFile, match="SHA-256"):
        fetch_wheel(Wheel("some-pkg", "1.0", digest(b"other")), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_an_index_the_error_says_what_to_do(tmp_path, monkeypatch):
    fake_pip(monkeypatch, "raise SystemExit('ERROR: No matching distribution found')")
    with pytest.raises(
        LoadError,
        match=r"some-pkg==1.0: ERROR: No matching.*put some_pkg-1.0-py3-none-any.whl into",
    ):
        fetch_wheel(Wheel("some-pkg", "1.0", "0" * 64), tmp_path)


def test_without_apt_a_package_put_there_by_hand_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"apt-get is not installed.*put some-doc_\*.deb into"):
        fetch_deb("some-doc", tmp_path)
    (tmp_path / "some-doc_1.0_all.deb").write_bytes(b"")
    assert fetch_deb("some-doc", tmp_path).name == "some-doc_1.0_all.deb"


def test_a_step_is_made_once_and_again_for_another_stamp(tmp_path):
    said = []

    def build(folder: Path) -> str:
        (folder / f"file{len(said)}").write_text("x")
        return "made"

    for stamp in ({"recipe": 1}, {"recipe": 1}, {"recipe": 2}):
        thirdparty.step(tmp_path / "texts", stamp, build, said.append)
    assert [line.split(": ")[1][:13] for line in said] == [
        "made (0 s)",
        "already there",
        "made (0 s)",
    ]
    assert sorted(path.name for path in (tmp_path / "texts").iterdir()) == ["file2", "source.json"]


def test_a_cut_step_leaves_no_folder_and_the_next_run_starts_clean(tmp_path):
    def cut(folder: Path) -> str:
        (folder / "half").write_text("x")
        raise DataError("cut")

    with pytest.raises(DataError, match="cut"):
        thirdparty.step(tmp_path / "texts", {}, cut, lambda line: None)
    assert not (tmp_path / "texts").exists()
    thirdparty.step(tmp_path / "texts", {}, lambda folder: "made", lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]
    assert not (tmp_path / "texts" / "half").exists()


def test_a_folder_of_another_origin_is_left_alone(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "mine").write_text("x")
    with pytest.raises(AlreadyExists, match="move it away"):
        thirdparty.step(tmp_path / "texts", {}, lambda folder: "made")
    assert (tmp_path / "texts" / "mine").exists()


def test_the_command_prints_one_line_and_exits_1(tmp_path, capsys, monkeypatch):
    (tmp_path / "smollm2-135m-instruct").mkdir()
    monkeypatch.setattr(sys, "argv", ["thirdparty", "prepare", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        run_to_the_end(app)
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith(f"kvbridge: {tmp_path}")
    assert "move it away" in error
    assert error.count("\n") == 1


def test_every_wheel_is_pinned():
    wheels = [wheel for source in thirdparty.SOURCES.values() for wheel in source.wheels()]
    assert len({wheel.filename for wheel in wheels}) == 6
    assert all(len(wheel.sha256) == 64 and wheel.version for wheel in wheels)
    assert {source.folder for source in thirdparty.SOURCES.values()} == set(
        thirdparty_models.MODELS
    )


@pytest.mark.parametrize("model", thirdparty_models.MODELS.values(), ids=lambda model: model.folder)
def test_the_names_cover_the_model(model):
    """Every tensor of a model of this config, and no other, is reached from a GGUF name."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        expected = set(AutoModelForCausalLM.from_config(model.config).state_dict()) - {
            "lm_head.weight"
        }
    kinds = {*thirdparty_models._BLOCK, *model.norms}
    if not model.adds_bos:  # Llama has no norms on queries and keys
        kinds -= {"attn_q_norm", "attn_k_norm"}
    blocks = range(model.config.num_hidden_layers)
    names = {model.name(f"blk.{block}.{kind}.weight") for block in blocks for kind in kinds}
    assert names | {model.name("token_embd.weight"), model.name("output_norm.weight")} == expected
    with pytest.raises(CorruptFile, match=r"'output\.weight'"):
        model.name("output.weight")


def test_query_rows_lose_the_interleaving_of_rope():
    """llama.cpp puts row i and row i + half of a head side by side; taken apart again, the weight
    is the old one."""
    model = thirdparty_models.SMOLLM2
    heads, width = model.config.num_key_value_heads, model.config.head_dim
    original = np.arange(heads * width * 2, dtype=np.float32).reshape(heads * width, 2)
    permuted = np.empty_like(original)
    for head in range(heads):
        for i in range(width // 2):
            permuted[head * width + 2 * i] = original[head * width + i]
            permuted[head * width + 2 * i + 1] = original[head * width + width // 2 + i]
    assert torch.equal(model.weight("blk.0.attn_k.weight", permuted), torch.from_numpy(original))
    assert torch.equal(model.weight("blk.0.attn_v.weight", permuted), torch.from_numpy(permuted))


def test_only_gemma_norms_lose_their_one():
    values = np.array([1.0, 1.5], dtype=np.float32)
    gemma, smollm2 = thirdparty_models.GEMMA, thirdparty_models.SMOLLM2
    for name in ("output_norm.weight", "blk.3.attn_q_norm.weight", "blk.3.post_ffw_norm.weight"):
        assert gemma.weight(name, values).tolist() == [0.0, 0.5]
    assert smollm2.weight("blk.3.attn_norm.weight", values).tolist() == [1.0, 1.5]
    assert gemma.weight("blk.3.ffn_up.weight", values).tolist() == [1.0, 1.5]


def test_the_configs_are_those_of_the_published_models():
    gemma, smollm2 = thirdparty_models.GEMMA.config, thirdparty_models.SMOLLM2.config
    assert [i for i, kind in enumerate(gemma.layer_types) if kind == "full_attention"] == [
        5,
        11,
        17,
    ]
    assert gemma.rope_parameters["sliding_attention"]["rope_theta"] == 10_000
    assert gemma.rope_parameters["full_attention"]["rope_theta"] == 1_000_000
    assert (gemma.num_attention_heads, gemma.num_key_value_heads, gemma.head_dim) == (4, 1, 256)
    assert (smollm2.num_hidden_layers, smollm2.num_key_value_heads, smollm2.head_dim) == (30, 3, 64)
