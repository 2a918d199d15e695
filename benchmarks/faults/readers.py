"""What fuzzing calls: everything that reads a byte of an asset before its digest is known, and a
starting corpus."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

from kvbridge.codec import parse_json
from kvbridge.errors import KVBridgeError
from kvbridge.files import parse_sums
from kvbridge.format import CALIBRATION, CONTROL_SET, MAX_ASSET_TENSORS, TRANSLATOR
from kvbridge.headers import read_safetensors_header
from kvbridge.registry.store.finite import FiniteScan
from kvbridge.registry.store.records import record_of
from kvbridge.registry.store.refs import Ref
from tests.registry import assets

KINDS = ("translator", "controls", "calibration", "signature")


def read_manifest(data: bytes) -> None:
    """As admission reads a description."""
    kind, data = (
        (KINDS[data[0]], data[1:])
        if data[:1] in (b"\0", b"\1", b"\2", b"\3")
        else ("translator", data)
    )
    record, manifest = record_of(kind, "", 0, parse_json(data, "fuzz"), "fuzz")
    if manifest is not None:
        _ = manifest.maps.shapes
        manifest.binding.encode()
    json.dumps(record.to_json(), ensure_ascii=False).encode()


def read_header(data: bytes) -> None:
    """As admission reads weights: the header, then the bytes."""
    header = read_safetensors_header(
        io.BytesIO(data), len(data), "fuzz", max_tensors=MAX_ASSET_TENSORS
    )
    scan = FiniteScan(header)
    for start in range(8 + int.from_bytes(data[:8], "little"), len(data), 5):
        scan.update(data[start : start + 5])


def read_sums(data: bytes) -> None:
    """SHA256SUMS."""
    for name in parse_sums(data, "fuzz"):
        if "/" in name or "\0" in name or name in (".", ".."):
            raise AssertionError(name)


def read_ref(data: bytes) -> None:
    """A reference file."""
    ref = Ref.from_bytes(data, "fuzz")
    if Ref.from_bytes(ref.to_bytes(), "fuzz") != ref:
        raise AssertionError(ref)


READERS = (read_manifest, read_header, read_sums, read_ref)


def one(data: bytes) -> None:
    """The first byte chooses the reader."""
    if data:
        with contextlib.suppress(KVBridgeError):
            READERS[data[0] % len(READERS)](data[1:])


def seeds(folder: Path) -> None:
    """A starting corpus of real files."""

    folder.mkdir(parents=True, exist_ok=True)
    files = assets.files(
        assets.geometry("a/s", heads=1, width=2), assets.geometry("a/r", heads=1, width=2)
    )
    digest = "0" * 64
    bound = {
        "schema": CONTROL_SET.schema,
        "translator": digest,
        "receiver_features": "embeddings",
        "maps": [],
    }
    ref = Ref("translator", (digest, digest), "main", digest, 1, "org/pair@main", "a/s..a/r")
    corpus = [
        (0, files[TRANSLATOR.description]),
        (0, b"\1" + json.dumps(bound).encode()),
        (
            0,
            b"\2" + json.dumps({"schema": CALIBRATION.schema, "translator": digest}).encode(),
        ),
        (1, files[TRANSLATOR.tensors]),
        (1, (8 + 2).to_bytes(8, "little") + b"{}        "),
        (2, f"{digest}  manifest.json\n{digest}  weights.safetensors\n".encode()),
        (3, ref.to_bytes()),
    ]
    for index, (reader, data) in enumerate(corpus):
        (folder / f"seed{index}").write_bytes(bytes([reader]) + data)
