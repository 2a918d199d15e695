"""Hostile and damaged snapshots: each is refused as a FileError, and one of another text is a
Decision."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

import kvbridge
from kvbridge.cache.provenance import Provenance
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.cache.snapshot_file import Description
from kvbridge.errors import CorruptFile, FileError, UnknownSchema
from kvbridge.format import METADATA_KEY
from kvbridge.model.passages import Passage
from tests.hostile import forge as forge_tools
from tests.hostile.forge import join_weights, set_at, split_weights
from tests.hostile.test_assets import Bomb
from tests.models import SENTENCES, tiny, tiny_causal, wrapped

TEXT = SENTENCES[0]


@cache
def snapshot() -> KVSnapshot:
    """A small model's cache of TEXT."""
    return kvbridge.capture(tiny("llama"), TEXT)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A sound saved snapshot."""
    snapshot().save(tmp_path / "one.kv")
    return tmp_path / "one.kv"


def refused(path: Path, kind: type[FileError] = CorruptFile) -> str:
    return forge_tools.refused(path, kind, KVSnapshot.load)


def forge(
    path: Path,
    body: Callable[[dict], Any] | None = None,
    tensors: Callable[[dict], Any] | None = None,
) -> None:
    """Writes the snapshot changed, its digest computed anew wherever the metadata can still be
    read."""
    own = snapshot()
    held: dict[str, Tensor] = {
        f"layers.{i}.{n}": t.contiguous()
        for i, layer in enumerate(own.layers)
        for n, t in layer.items()
    }
    held |= {
        "token_ids": own.token_ids.clone(),
        "positions": own.positions.clone(),
        "spans": own.spans.clone(),
    }
    if tensors:
        tensors(held)
    said = Description(own.text_digest, own.characters, own.geometry, own.provenance, "").to_json()
    if body:
        body(said)
    try:
        bare = Description(
            said["text_digest"],
            said["characters"],
            kvbridge.KVGeometry.from_json(said["geometry"]),
            Provenance.from_json(said["provenance"]),
            "",
            tuple(Passage(*passage) for passage in said.get("passages", ())),
        )
        said["digest"] = bare.content_digest(held) if said["digest"] == "" else said["digest"]
    except (KeyError, TypeError, ValueError, FileError):
        pass
    path.write_bytes(
        save(
            {k: v.contiguous() for k, v in held.items()}, metadata={METADATA_KEY: json.dumps(said)}
        )
    )


def test_what_was_saved_comes_back_and_forging_nothing_loads(file):
    for _ in range(2):
        loaded = KVSnapshot.load(file)
        assert torch.equal(loaded.token_ids, snapshot().token_ids)
        assert torch.equal(loaded.spans, snapshot().spans)
        assert all(
            torch.equal(a[n], b[n])
            for a, b in zip(loaded.layers, snapshot().layers, strict=True)
            for n in a
        )
        assert loaded.geometry == snapshot().geometry
        assert loaded.provenance == snapshot().provenance
        assert (loaded.text_digest, loaded.characters) == (
            snapshot().text_digest,
            snapshot().characters,
        )
        forge(file)


def test_truncated_or_padded(file):
    data = file.read_bytes()
    for length in (0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        refused(file)
    file.write_bytes(data + b"\0")
    refused(file)


def test_one_bit_flipped_anywhere(file):
    data = file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    offsets = {
        *range(0, header, max(1, header // 150)),
        *range(header, len(data), max(1, len(data) // 60)),
        len(data) - 1,
    }
    for offset in sorted(offsets):
        for bit in (0, 4):
            flipped = bytearray(data)
            flipped[offset] ^= 1 << bit
            file.write_bytes(flipped)
            with pytest.raises(FileError):
                KVSnapshot.load(file)


def test_what_is_not_a_file(tmp_path, file):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for path in (
        tmp_path / "missing",
        tmp_path / "folder",
        tmp_path / "pipe",
        tmp_path / "dangling",
        Path("/dev/zero"),
    ):
        refused(path)
    refused(tmp_path / "a\0b")


def test_pickle_in_disguise_runs_nothing(tmp_path):
    marker = tmp_path / "ran"
    for legacy in (False, True):
        torch.save(
            {"token_ids": Bomb(marker)},
            tmp_path / "one.kv",
            _use_new_zipfile_serialization=not legacy,
        )
        refused(tmp_path / "one.kv")
    assert not marker.exists()


@pytest.mark.parametrize(
    "schema", ["kvbridge.snapshot/2", "", None, 3, [], "kvbridge.translator/1"]
)
def test_an_unknown_version_is_named(file, schema):
    forge(file, lambda body: body.update(schema=schema))
    assert "kvbridge.snapshot/1" in refused(file, UnknownSchema)


NUMBERS: tuple[Any, ...] = (-1, True, 1.0, "1", None, [], 10**30, float("nan"), float("inf"))
BAD_PASSAGES: tuple[Any, ...] = (
    None,
    {},
    [3],
    [[0, 4]],
    [[4, 0, "0" * 64]],
    [[0, -1, "0" * 64]],
    [[-1, 4, "0" * 64]],
    [[-2, -2, "0" * 64]],
    [[0, 4, "zero"]],
    [[True, 4, "0" * 64]],
    [[3, 9, "0" * 64], [5, 12, "0" * 64]],
)
BAD_BODIES: dict[str, Callable[[dict], Any]] = {
    "no schema": lambda b: b.pop("schema"),
    "no digest": lambda b: b.pop("digest"),
    "no geometry": lambda b: b.pop("geometry"),
    "no provenance": lambda b: b.pop("provenance"),
    "extra": set_at("extra", value=1),
    "wrong digest": set_at("digest", value="0" * 64),
    "digest a number": set_at("digest", value=1),
    "text digest a number": set_at("text_digest", value=1),
    "geometry a list": set_at("geometry", value=[]),
    "provenance a list": set_at("provenance", value=[]),
    "a layer less": lambda b: b["geometry"]["layers"].pop(),
    "a layer more": lambda b: b["geometry"]["layers"].append(b["geometry"]["layers"][0]),
    "wider": set_at("geometry", "layers", 0, "streams", 0, "width", value=32),
    "fewer characters than the spans": set_at("characters", value=3),
    **{f"characters {n!r}": set_at("characters", value=n) for n in NUMBERS},
    **{f"depth {n!r}": set_at("provenance", "depth", value=n) for n in NUMBERS},
    "producer a number": set_at("provenance", "producer", value=1),
    "receiver null": set_at("provenance", "receiver", value=None),
    "receiver another model": set_at("provenance", "receiver", value="0" * 64),
    "translator a number": set_at("provenance", "translator", value=0),
    "spans missing": lambda b: b["provenance"].pop("spans"),
    "no spans": set_at("provenance", "spans", value=[]),
    "spans too many fields": set_at("provenance", "spans", value=[[0, 4, 0, 1, "exact", 1]]),
    "spans overlap": lambda b: b["provenance"]["spans"].append(b["provenance"]["spans"][0]),
    "spans beyond": set_at("provenance", "spans", value=[[0, 4, 0, 10**9, "exact"]]),
    "spans too few layers": lambda b: b["provenance"]["spans"][0].__setitem__(1, 3),
    "spans backwards": lambda b: b["provenance"]["spans"][0].__setitem__(0, 4),
    **{f"span from {n!r}": set_at("provenance", "spans", 0, 2, value=n) for n in NUMBERS},
    "unknown fidelity": lambda b: b["provenance"]["spans"][0].__setitem__(4, "perfect"),
    "fidelity a list": lambda b: b["provenance"]["spans"][0].__setitem__(4, ["exact"]),
    **{f"passages {rows!r:.60}": set_at("passages", value=rows) for rows in BAD_PASSAGES},
    "approximate at depth 0": lambda b: b["provenance"]["spans"][0].__setitem__(4, "approximate"),
}


@pytest.mark.parametrize("what", BAD_BODIES)
def test_metadata_that_says_what_cannot_be(file, what):
    forge(file, BAD_BODIES[what])
    refused(file)


def test_passages_in_order_are_taken(file):
    rows = [[0, 4, "0" * 64], [-1, -1, "1" * 64], [4, 9, "2" * 64]]
    forge(file, set_at("passages", value=rows))
    assert KVSnapshot.load(file).passages == tuple(Passage(*row) for row in rows)


BAD_TENSORS: dict[str, Callable[[dict], Any]] = {
    "no ids": lambda t: t.pop("token_ids"),
    "no positions": lambda t: t.pop("positions"),
    "no spans": lambda t: t.pop("spans"),
    "a layer's keys missing": lambda t: t.pop("layers.2.k"),
    "an extra tensor": lambda t: t.update({"layers.4.k": torch.zeros(1)}),
    "a path": lambda t: t.update({"../../etc/passwd": torch.zeros(1)}),
    "nul": lambda t: t.update({"layers.0.k\0": torch.zeros(1)}),
    "ids as floats": lambda t: t.update(token_ids=t["token_ids"].double()),
    "ids as int32": lambda t: t.update(token_ids=t["token_ids"].int()),
    "positions as bools": lambda t: t.update(positions=t["positions"].bool()),
    "keys as integers": lambda t: t.update({"layers.0.k": t["layers.0.k"].int()}),
    "values as bytes": lambda t: t.update({"layers.3.v": t["layers.3.v"].to(torch.uint8)}),
    "ids fewer": lambda t: t.update(token_ids=t["token_ids"][1:]),
    "ids two-dimensional": lambda t: t.update(token_ids=t["token_ids"][None]),
    "spans flat": lambda t: t.update(spans=t["spans"].flatten()),
    "keys of other shape": lambda t: t.update({"layers.0.k": t["layers.0.k"].flatten(1)}),
    "positions back": lambda t: t.update(positions=t["positions"].flip(0)),
    "positions twice": lambda t: t.update(positions=torch.zeros_like(t["positions"])),
    "positions negative": lambda t: t.update(positions=t["positions"] - 1),
    "ids negative": lambda t: t["token_ids"].__setitem__(0, -1),
    "ids beyond the vocabulary": lambda t: t["token_ids"].__setitem__(0, 2**40),
    "spans negative": lambda t: t["spans"].__setitem__((0, 0), -1),
    "spans backwards": lambda t: t.update(spans=t["spans"].flip(1)),
    "spans beyond the text": lambda t: t["spans"].__setitem__((-1, 1), 10**6),
    "spans going back": lambda t: t.update(spans=t["spans"].flip(0)),
}


@pytest.mark.parametrize("what", BAD_TENSORS)
def test_tensors_that_are_not_a_cache(file, what):
    forge(file, tensors=BAD_TENSORS[what])
    refused(file)


def test_metadata_that_is_not_plain_json(file):
    header, data = split_weights(file)
    good = header["__metadata__"][METADATA_KEY]
    for bad in (
        "",
        "[]",
        "1",
        "null",
        good[:-1],
        good + "}",
        good.replace("{", '{"schema": "kvbridge.snapshot/1", ', 1),
        good.replace(f'"characters": {len(TEXT)}', '"characters": NaN'),
        "[" * 100_000,
        '{"a":' * 50_000,
        good.replace(f'"characters": {len(TEXT)}', '"characters": 1e999'),
        good.replace("tiny", "\\ud800"),
    ):
        assert bad != good
        join_weights(file, {**header, "__metadata__": {METADATA_KEY: bad}}, data)
        refused(file)
    join_weights(file, {**header, "__metadata__": {}}, data)
    refused(file)


def test_header_lies_allocate_nothing(file):
    header, data = split_weights(file)
    for shape, offsets in (
        ([2**40, 2, 16], [0, 2**47]),
        ([2**62], [0, 2**62]),
        ([0] * 5000, [0, 0]),
        ([2**63 - 1] * 8, [0, 8]),
    ):
        join_weights(
            file,
            {**header, "layers.0.k": {"dtype": "F32", "shape": shape, "data_offsets": offsets}},
            data,
        )
        refused(file)
    many = {
        f"layers.{i}.k": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        for i in range(5_000)
    }
    join_weights(file, {**many, "__metadata__": header["__metadata__"]}, b"")
    refused(file)


def test_a_snapshot_of_another_text_or_model_is_a_decision_not_an_error(file, tmp_path):
    sender = tiny("llama")
    receiver = wrapped(tiny_causal("llama", 7, num_hidden_layers=3), name="other")
    bridge = kvbridge.Bridge(None, sender=sender, receiver=receiver)
    loaded = KVSnapshot.load(file)
    for text in (SENTENCES[1], TEXT[:-1] + "!", TEXT[1:]):
        assert bridge.handoff(loaded, text).decision.reason == "text_mismatch"
    turned = kvbridge.Bridge(None, sender=receiver, receiver=sender)
    assert turned.handoff(loaded, TEXT).decision.reason == "wrong_pair"
    loaded.layers[1]["k"][2, 0, 0] = float("nan")
    loaded.save(tmp_path / "nan.kv")
    again = KVSnapshot.load(tmp_path / "nan.kv")
    assert bool(again.layers[1]["k"].isnan().any()), (
        "NaN in a cache is a matter of the request, not of the file"
    )
