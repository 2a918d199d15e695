"""Hostile and damaged assets: each is refused as a FileError, none loads, nothing is overwritten."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import kvbridge
from kvbridge.asset import controls_path
from kvbridge.errors import AlreadyExists, CorruptFile, FileError, UnknownSchema
from kvbridge.files import SUMS, file_digest, sums_of
from tests.hostile.forge import (
    CARD,
    CONTROLS,
    MANIFEST,
    WEIGHTS,
    binding_of,
    forge_manifest,
    forge_weights,
    join_weights,
    made_fit,
    reseal,
    resize,
    saved,
    sound_copy,
    split_weights,
)

FILES = (MANIFEST, WEIGHTS, CARD, SUMS)


def refused(folder: Path, kind: type[FileError] = CorruptFile) -> str:
    with pytest.raises(FileError) as found:
        kvbridge.load_asset(folder)
    assert type(found.value) is kind, repr(found.value)
    assert len(str(found.value)) < 2000
    return str(found.value)


def test_forging_nothing_still_loads(asset):
    manifest = sound_copy(asset)
    assert manifest.weights_bytes == (asset / WEIGHTS).stat().st_size


def test_the_binding_is_what_the_manifest_says(asset):
    loaded = kvbridge.load_asset(asset)
    assert loaded.manifest.binding == binding_of(loaded.manifest.body)
    assert split_weights(asset / WEIGHTS)[0]["__metadata__"] == {"kvbridge": loaded.manifest.binding}


@pytest.mark.parametrize("name", FILES)
def test_truncated(asset, name):
    data = (asset / name).read_bytes()
    for length in (0, 1, 7, 8, 9, len(data) // 2, len(data) - 1):
        (asset / name).write_bytes(data[:length])
        refused(asset)
        if name != SUMS:
            reseal(asset)
            if name != CARD and (name, length) != (MANIFEST, len(data) - 1):
                refused(asset)
        (asset / name).write_bytes(data)
        reseal(asset)
    kvbridge.load_asset(asset)


@pytest.mark.parametrize("name", FILES)
def test_one_bit_flipped_anywhere(asset, name):
    data = (asset / name).read_bytes()
    for offset in sorted({*range(0, len(data), max(1, len(data) // 40)), 0, 7, 8, len(data) - 1}):
        for bit in (0, 5):
            flipped = bytearray(data)
            flipped[offset] ^= 1 << bit
            (asset / name).write_bytes(flipped)
            refused(asset)
    (asset / name).write_bytes(data)
    kvbridge.load_asset(asset)


@pytest.mark.parametrize("name", FILES)
def test_missing_linked_or_special_files(asset, name, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (asset / name).rename(elsewhere)
    refused(asset)
    (asset / name).symlink_to(elsewhere)
    refused(asset)
    (asset / name).unlink()
    (asset / name).mkdir()
    refused(asset)
    (asset / name).rmdir()
    os.mkfifo(asset / name)
    refused(asset)
    (asset / name).unlink()
    (asset / name).symlink_to("/dev/zero")
    refused(asset)


def test_folders_that_are_none(tmp_path, asset):
    for path in (tmp_path / "missing", asset / MANIFEST, tmp_path / "a\0b", Path("x" * 5000)):
        refused(path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path / "loop")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty")


@pytest.mark.parametrize("name", ["evil.py", ".hidden", "weights.safetensors.bak", "model.pt", "Manifest.json"])
@pytest.mark.parametrize("listed", [False, True])
def test_extra_files_listed_or_not(asset, name, listed):
    (asset / name).write_bytes(b"anything")
    if listed:
        reseal(asset)
    refused(asset)


@pytest.mark.parametrize(
    "name",
    [
        "../outside", "/etc/passwd", "sub/manifest.json", "..", ".", "", "a\0b", "manifest.json\0", "MANIFEST.json",
        "man\u0131fest.json", "manifest.json\u200b", "nul\\name", "-rf", "a" * 300, SUMS, "manifest.json ", "\tmanifest.json",
    ],
)  # fmt: skip
def test_paths_and_look_alikes_in_the_list_of_sums(asset, name):
    sums = (asset / SUMS).read_text()
    digest = sums[:64]
    (asset / SUMS).write_text(f"{sums}{digest}  {name}\n", "utf-8")
    refused(asset)
    (asset / SUMS).write_text(sums.replace("manifest.json", name), "utf-8")
    refused(asset)


def test_malformed_lists_of_sums(asset):
    good = (asset / SUMS).read_text()
    first = good.splitlines()[0]
    for bad in (
        good + first + "\n", good.upper(), good.replace("  ", " "), good.replace("  ", " *"), good + "\n", "\n" + good,
        good.replace("\n", "\r\n"), good.replace("\n", "\x0b"), good + "# comment\n", "\ufeff" + good, good * 2000, "",
    ):  # fmt: skip
        (asset / SUMS).write_bytes(bad.encode())
        refused(asset)
    (asset / SUMS).write_bytes(b"\xff" * 100)
    refused(asset)


def test_swapped_direction(asset):
    def swap(body):
        body["sender"], body["receiver"] = body["receiver"], body["sender"]

    forge_manifest(asset, swap, bind=False)
    refused(asset)


def test_weights_of_another_pair_or_another_fit(asset, tmp_path):
    other = saved(tmp_path / "other", seed=1)
    shutil.copy(other / WEIGHTS, asset / WEIGHTS)
    resize(asset)
    assert "not of this manifest" in refused(asset)


def test_manifest_of_another_fit_of_the_same_pair(asset):
    forge_manifest(asset, lambda body: body.update(corpus_digest="0" * 64), bind=False)
    assert "not of this manifest" in refused(asset)


def code_ran(marker: Path) -> None:
    marker.touch()


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (code_ran, (self.marker,))


@pytest.mark.parametrize("name", [WEIGHTS, MANIFEST, CARD])
@pytest.mark.parametrize("legacy", [False, True])
def test_pickle_in_disguise_runs_nothing(asset, tmp_path, name, legacy):
    marker = tmp_path / "ran"
    torch.save({"target.0.k.W": Bomb(marker)}, asset / name, _use_new_zipfile_serialization=not legacy)
    if name == WEIGHTS:
        resize(asset)
    else:
        reseal(asset)
    if name == CARD:
        kvbridge.load_asset(asset)
    else:
        refused(asset)
    assert not marker.exists()
    torch.load(saved_bomb(tmp_path, marker), weights_only=False)
    assert marker.exists(), "the disguised file must be able to harm"


def saved_bomb(folder: Path, marker: Path) -> Path:
    path = folder / "bomb.pt"
    torch.save(Bomb(marker), path)
    return path


def set_at(*path, value):
    """A change of a manifest: body[path] = value."""

    def change(body):
        for step in path[:-1]:
            body = body[step]
        body[path[-1]] = value

    return change


def drop(*path):
    """A change of a manifest: del body[path]."""

    def change(body):
        for step in path[:-1]:
            body = body[step]
        del body[path[-1]]

    return change


GROUP = ("maps", 0, "groups", 0)
BAD_NUMBERS: tuple[Any, ...] = (-1, True, 1.0, "1", None, [], 10**30, 2**63)
BAD_MANIFESTS = {
    "not an object": lambda body: [body],
    "a string": lambda body: "kvbridge.translator/1",
    "empty": lambda body: {},
    "unknown field": set_at("extra", value=1),
    "no maps": set_at("maps", value=[]),
    "maps null": set_at("maps", value=None),
    "maps a string": set_at("maps", value="maps"),
    "a map missing": drop("maps", -1),
    "the first map missing": drop("maps", 0),
    "a map twice": lambda body: body["maps"].append(copy.deepcopy(body["maps"][0])),
    "a map extra": lambda body: body["maps"].append({**copy.deepcopy(body["maps"][0]), "stream": "latent"}),
    **{f"map layer {n!r}": set_at("maps", 0, "layer", value=n) for n in (3, *BAD_NUMBERS)},
    **{f"head {n!r}": set_at(*GROUP, "heads", value=[0, n]) for n in (2, 0, *BAD_NUMBERS)},
    **{f"block layer {n!r}": set_at(*GROUP, "blocks", 0, 0, value=n) for n in (3, *BAD_NUMBERS)},
    **{f"block head {n!r}": set_at(*GROUP, "blocks", 0, 2, value=[n]) for n in (2, *BAD_NUMBERS)},
    "block of another stream": set_at(*GROUP, "blocks", 0, 1, value="latent"),
    "block of three layers": set_at(*GROUP, "blocks", value=[[0, "k", None, 1]]),
    "no heads": set_at(*GROUP, "heads", value=[]),
    "an empty group": lambda body: body["maps"][0]["groups"].append({"heads": [], "blocks": [], "features": True}),
    "features a number": set_at(*GROUP, "features", value=1),
    "no features where announced": set_at(*GROUP, "features", value=False),
    **{f"receiver features {v!r}": set_at("receiver_features", value=v) for v in ("none", "hidden:3", "hidden:0", "banana", "hidden:-1", 0, None, "hidden:1 ")},
    **{f"weights_bytes {n!r}": set_at("weights_bytes", value=n) for n in (0, 5, *BAD_NUMBERS)},
    **{f"parameters {n!r}": set_at("parameters", value=n) for n in (0, *BAD_NUMBERS)},
    **{f"{name} of another kind": set_at(name, value=7) for name in ("family", "config", "lambda", "jitter", "corpus_digest", "splits", "scores", "licences", "marks", "sender", "receiver")},
    "share a string": set_at("alignment_exact_share", value="1"),
    "share true": set_at("alignment_exact_share", value=True),
    "share of two": set_at("alignment_exact_share", value=2.0),
    "marks of numbers": set_at("marks", value=[1]),
    "scores of the train split": set_at("scores", "split", value="train"),
    **{f"{side} {name} {n!r}": set_at(side, name, value=n) for side in ("sender", "receiver") for name in ("hidden_size", "attention_heads", "max_positions", "vocabulary", "parameters", "layer_parameters") for n in (-1, 0, True, 1.0, "1", None, 10**30)},
    **{f"stream {name} {n!r}": set_at("receiver", "layers", 1, "streams", 0, name, value=n) for name in ("heads", "width") for n in (0, *BAD_NUMBERS)},
    "stream rotated 1": set_at("receiver", "layers", 1, "streams", 0, "rotated", value=1),
    "stream twice": lambda body: body["sender"]["layers"][0]["streams"].append(body["sender"]["layers"][0]["streams"][0]),
    "no streams": set_at("sender", "layers", 2, "streams", value=[]),
    "no layers": set_at("sender", "layers", value=[]),
    "layers a string": set_at("sender", "layers", value="abc"),
    "layer kind": set_at("sender", "layers", 0, "kind", value="recurrent"),
    **{f"window {n!r}": set_at("sender", "layers", 0, "window_tokens", value=n) for n in (0, -5, True, 1.5, "8")},
    "unknown geometry field": set_at("sender", "extra", value="x"),
    "unknown layer field": set_at("sender", "layers", 0, "extra", value="x"),
    "unknown stream field": set_at("sender", "layers", 0, "streams", 0, "extra", value="x"),
    "missing geometry field": drop("sender", "rope_digest"),
    "missing layer field": drop("sender", "layers", 0, "weights_digest"),
    "adapters a string": set_at("sender", "adapters", value="abc"),
    "adapters of numbers": set_at("sender", "adapters", value=[1]),
    "digest a number": set_at("sender", "weights_digest", value=1),
    "dtype unknown": set_at("sender", "dtype", value="int3"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_MANIFESTS)
def test_manifests_that_say_what_cannot_be(asset, what):
    forge_manifest(asset, BAD_MANIFESTS[what])
    assert "not of this manifest" not in refused(asset), "refused by the binding alone"


def test_every_field_is_needed(asset):
    original = (asset / MANIFEST).read_text("utf-8")
    for name in json.loads(original):
        (asset / MANIFEST).write_text(original, "utf-8")
        forge_manifest(asset, drop(name))
        refused(asset)


@pytest.mark.parametrize(
    "schema", ["kvbridge.translator/2", "kvbridge.translator", "", None, 1, [], {}, "kvbridge.controls/1"]
)
def test_an_unknown_version_is_named(asset, schema):
    forge_manifest(asset, set_at("schema", value=schema))
    message = refused(asset, UnknownSchema)
    assert "kvbridge.translator/1" in message


BAD_JSON = {
    "duplicate keys": lambda text: text.replace("{", '{"schema": "kvbridge.translator/1",', 1),
    "duplicate keys within": lambda text: text.replace('"documents": 2', '"documents": 2, "documents": 3', 1),
    "NaN": lambda text: text.replace('"alignment_exact_share": 1.0', '"alignment_exact_share": NaN'),
    "infinity": lambda text: text.replace('"alignment_exact_share": 1.0', '"alignment_exact_share": -Infinity'),
    "overflow": lambda text: text.replace('"alignment_exact_share": 1.0', '"alignment_exact_share": 1e999'),
    "nesting": lambda text: text.replace('"marks": []', '"marks": ' + "[" * 100_000 + "]" * 100_000),
    "nesting of objects": lambda text: text.replace('"marks": []', '"marks": ' + '{"a":' * 50_000 + "1" + "}" * 50_000),
    "nesting a little": lambda text: text.replace('"scores": {', '"scores": {"deep": ' + "[" * 900 + "]" * 900 + ","),
    "digits": lambda text: text.replace('"parameters": 1000', '"parameters": ' + "9" * 10_000, 1),
    "surrogate": lambda text: text.replace("sender-0", "sender\\ud800", 1),
    "trailing": lambda text: text + "{}",
    "comment": lambda text: "// hi\n" + text,
    "byte order mark": lambda text: "\ufeff" + text,
    "only space": lambda text: " " * 1000,
    "many values": lambda text: text.replace('"marks": []', '"marks": [' + "0," * 2_000_000 + "0]"),
    "too large": lambda text: text + " " * (17 << 20),
}


@pytest.mark.parametrize("what", BAD_JSON)
def test_manifests_that_are_not_plain_json(asset, what):
    text = (asset / MANIFEST).read_text("utf-8")
    changed = BAD_JSON[what](text)
    assert changed != text
    (asset / MANIFEST).write_text(changed, "utf-8")
    if what == "nesting a little":
        body = json.loads(changed)
        forge_manifest(asset, lambda _: body)
        with pytest.raises(FileError):
            kvbridge.load_asset(asset)
        return
    reseal(asset)
    refused(asset)


@pytest.mark.parametrize("raw", [b"\xff\xfe{\x00}\x00", '{"é": 1}'.encode("latin-1"), b"\x80\x04."])
def test_manifests_that_are_not_utf8(asset, raw):
    (asset / MANIFEST).write_bytes(raw)
    reseal(asset)
    refused(asset)


def tensor(name="target.0.k.W", **changes):
    """A change of a weights header: one tensor's entry."""

    def change(header, data):
        header[name] = {**header[name], **changes}
        return header, data

    return change


def renamed(new):
    """A change of a weights header: target.0.k.W under another name."""

    def change(header, data):
        header[new] = header.pop("target.0.k.W")
        return header, data

    return change


def extra(new):
    """A change of a weights header: one more empty tensor."""

    def change(header, data):
        header[new] = {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]}
        return header, data

    return change


def other_dtype(dtype, size):
    """A change of a weights file: target.0.k.b, in another dtype, all offsets right."""

    def change(header, data):
        ordered = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
        at, parts = 0, []
        for name in ordered:
            start, stop = header[name]["data_offsets"]
            part = data[start:stop]
            if name == "target.0.k.b":
                part = bytes(8 * size)
                header[name]["dtype"] = dtype
            header[name]["data_offsets"] = [at, at + len(part)]
            at += len(part)
            parts.append(part)
        return header, b"".join(parts)

    return change


BAD_SHAPES: tuple[Any, ...] = ([8, 21], [168], [21, 8, 1], [-21, -8], [True, 168], [21.0, 8], ["21", 8], None, "ab", {}, [2**62, 8], [2**63, 2], [2**32, 2**32], [10**40, 0], [21, 8] + [1] * 500_000, [2**61] * 300_000)  # fmt: skip
BAD_DTYPES: tuple[Any, ...] = ("F64", "I32", "F8_E4M3", "f32", "", None, 4, ["F32"], {}, "pickle")
BAD_WEIGHTS = {
    "data cut": lambda h, d: (h, d[:-1]),
    "data padded": lambda h, d: (h, d + b"\0"),
    "no tensors": lambda h, d: ({"__metadata__": h["__metadata__"]}, b""),
    "no metadata": lambda h, d: ({k: v for k, v in h.items() if k != "__metadata__"}, d),
    "metadata a list": lambda h, d: ({**h, "__metadata__": []}, d),
    "metadata of numbers": lambda h, d: ({**h, "__metadata__": {"kvbridge": 1}}, d),
    "header a list": lambda h, d: ([h], d),
    "header a number": lambda h, d: (b"12345678", d),
    "header empty": lambda h, d: (b"", d),
    "header not UTF-8": lambda h, d: (b"\xff" * 64, d),
    "header with NaN": lambda h, d: (b'{"a": NaN}', d),
    "header nested": lambda h, d: (b"[" * 200_000, d),
    "a tensor twice": lambda h, d: (b'{"a": {"dtype":"F32","shape":[0],"data_offsets":[0,0]}, "a": {"dtype":"F32","shape":[0],"data_offsets":[0,0]}}', b""),
    "entry a list": lambda h, d: ({**h, "target.0.k.W": []}, d),
    "entry empty": lambda h, d: ({**h, "target.0.k.W": {}}, d),
    **{f"shape {s!r:.60}": tensor(shape=s) for s in BAD_SHAPES},
    **{f"dtype {t!r}": tensor(dtype=t) for t in BAD_DTYPES},
    **{f"offsets {o!r:.40}": tensor(data_offsets=o) for o in ([0, 0], [0, 2**63], [-672, 0], [672, 0], [0], [0, 672, 1], None, "ab", [0.0, 672.0], [False, 672], [1, 673], [10**30, 10**30 + 672])},
    **{f"renamed {n!r:.40}": renamed(n) for n in ("target.0.k.w", "../../target.0.k.W", "/etc/passwd", "target.0.k.W\0", "target.0.\u212a.W", "TARGET.0.k.W", "", "target.00.k.W", "target.0.k.0.W", "x" * 100_000)},
    **{f"extra {n!r:.40}": extra(n) for n in ("../evil", "/abs", "nul\0", "target.0.k.W ", "target.3.k.W", "Target.0.k.W", "\u202etarget", "__metadata__2")},
    **{f"bias as {t}": other_dtype(t, s) for t, s in (("I32", 4), ("I64", 8), ("U8", 1), ("BOOL", 1), ("F16", 2), ("BF16", 2), ("F64", 8))},
    "overlapping tensors": tensor("target.0.v.b", data_offsets=[0, 32]),
    "100 000 tensors": lambda h, d: ({f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)}, b""),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_WEIGHTS)
def test_weights_that_are_not_what_they_say(asset, what):
    forge_weights(asset, BAD_WEIGHTS[what])
    refused(asset)


@pytest.mark.parametrize("length", [0, 1, 2**24 + 1, 2**31, 2**40, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_allocates_nothing(asset, length):
    data = (asset / WEIGHTS).read_bytes()
    (asset / WEIGHTS).write_bytes(length.to_bytes(8, "little") + data[8:])
    reseal(asset)
    refused(asset)


def test_a_header_of_many_bytes_is_refused_unread(asset):
    with (asset / WEIGHTS).open("wb") as file:
        file.write(((1 << 27) - 8).to_bytes(8, "little"))
        file.truncate(1 << 27)
    sums = {p.name: file_digest(p) for p in asset.iterdir() if p.name != SUMS}
    (asset / SUMS).write_bytes(sums_of(sums))
    refused(asset)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, -4])
def test_weights_that_are_not_finite(asset, value, at):
    poison = torch.tensor([value]).numpy().tobytes()

    def change(header, data):
        changed = bytearray(data)
        changed[at % len(data) : at % len(data) + 4] = poison
        return header, bytes(changed)

    forge_weights(asset, change)
    assert "NaN or infinity" in refused(asset)


def test_controls_that_are_not_this_translators(asset, tmp_path):
    loaded = kvbridge.load_asset(asset)
    own, other = controls_path(asset), controls_path(saved(tmp_path / "other", seed=1))
    assert kvbridge.load_controls(loaded).sender_layers == ()

    def refuse(folder, kind=CorruptFile):
        with pytest.raises(FileError) as found:
            kvbridge.load_controls(loaded, folder)
        assert type(found.value) is kind

    refuse(other)
    refuse(asset)
    refuse(tmp_path / "missing")
    shutil.copy(other / CONTROLS, own / CONTROLS)
    reseal(own)
    refuse(own)


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (set_at("schema", value="kvbridge.controls/2"), UnknownSchema),
        (set_at("schema", value="kvbridge.translator/1"), UnknownSchema),
        (drop("schema"), UnknownSchema),
        (lambda body: [body], UnknownSchema),
        (set_at("translator", value="0" * 64), CorruptFile),
        (drop("translator"), CorruptFile),
        (set_at("extra", value=1), CorruptFile),
        (set_at("receiver_features", value="none"), CorruptFile),
        (set_at("receiver_features", value="hidden:9"), CorruptFile),
        (set_at("receiver_features", value=3), CorruptFile),
        (set_at("maps", value=None), CorruptFile),
        (drop("maps", -1), CorruptFile),
        (set_at("maps", 0, "layer", value=7), CorruptFile),
        (set_at("maps", 0, "groups", 0, "features", value=False), CorruptFile),
    ],
)
def test_hostile_controls(asset, what, kind):
    loaded = kvbridge.load_asset(asset)
    forge_manifest(controls_path(asset), what)
    with pytest.raises(FileError) as found:
        kvbridge.load_controls(loaded)
    assert type(found.value) is kind


def test_controls_that_read_the_sender_are_refused(asset):
    """A control with a sender block would make the token-only floor as high as the translation itself."""
    loaded = kvbridge.load_asset(asset)
    folder = controls_path(asset)
    shutil.copy(asset / WEIGHTS, folder / CONTROLS)
    forge_manifest(folder, set_at("maps", value=loaded.manifest.body["maps"]))
    with pytest.raises(CorruptFile, match="sender"):
        kvbridge.load_controls(loaded)


def content_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_saving_the_same_content_again_changes_nothing(asset):
    before, inode = content_of(asset), asset.stat().st_ino
    assert kvbridge.save_asset(made_fit(), asset) == kvbridge.load_asset(asset).digest
    assert content_of(asset) == before
    assert asset.stat().st_ino == inode
    assert [p.name for p in sorted(asset.parent.iterdir())] == ["asset", "asset.controls"]


@pytest.mark.parametrize(
    "prepare",
    ["other asset", "damaged", "foreign folder", "file", "link to a file", "dangling link", "link to an asset"],
)
def test_other_content_is_never_overwritten(tmp_path, prepare):
    path, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    if prepare == "other asset":
        saved(path, seed=1)
        shutil.rmtree(controls_path(path))
    elif prepare == "damaged":
        saved(path)
        (path / CARD).write_text("changed")
    elif prepare == "foreign folder":
        path.mkdir()
        (path / "thesis.txt").write_text("the only copy")
    elif prepare == "file":
        path.write_text("the only copy")
    elif prepare == "link to a file":
        elsewhere.write_text("the only copy")
        path.symlink_to(elsewhere)
    elif prepare == "dangling link":
        path.symlink_to(elsewhere)
    else:
        path.symlink_to(saved(elsewhere, seed=1))
    before = {str(p.relative_to(tmp_path)): p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}
    with pytest.raises(AlreadyExists):
        kvbridge.save_asset(made_fit(), path)
    after = {str(p.relative_to(tmp_path)): p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}
    assert after == before


def test_foreign_content_where_the_controls_belong_leaves_no_half_saved_asset(tmp_path):
    path = tmp_path / "asset"
    controls_path(path).mkdir()
    (controls_path(path) / "notes.txt").write_text("mine")
    with pytest.raises(AlreadyExists):
        kvbridge.save_asset(made_fit(), path)
    assert not path.exists()
    assert content_of(controls_path(path)) == {"notes.txt": b"mine"}


def test_head_local_assets_and_their_groups(tmp_path):
    folder = saved(tmp_path / "asset", family="head-local")
    sound_copy(folder)
    for change in (
        drop("maps", 0, "groups", -1),
        drop("maps", 0, "groups", 0),
        set_at("maps", 0, "groups", 1, "heads", value=[0]),
        set_at("maps", 0, "groups", 1, "heads", value=[1, 1]),
        set_at("maps", 0, "groups", 1, "blocks", 0, 2, value=[0, 1]),
        set_at("maps", 0, "groups", 1, "blocks", 0, 2, value=[]),
        set_at("maps", 0, "groups", 1, "blocks", 0, 2, value=[0, 0]),
    ):
        copy_ = tmp_path / "copy"
        shutil.copytree(folder, copy_)
        forge_manifest(copy_, change)
        refused(copy_)
        shutil.rmtree(copy_)


def test_join_and_split_are_inverse(asset):
    before = (asset / WEIGHTS).read_bytes()
    join_weights(
        asset / WEIGHTS, before[8 : 8 + int.from_bytes(before[:8], "little")], split_weights(asset / WEIGHTS)[1]
    )
    assert (asset / WEIGHTS).read_bytes() == before
