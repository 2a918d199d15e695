"""Hostile weights, every sum and binding right: each is refused as a FileError before it costs
memory."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import pytest
import torch

from kvbridge.errors import CorruptFile
from kvbridge.files import file_digest, sums_of
from kvbridge.format import SUMS
from kvbridge.headers import Header, read_safetensors_header
from tests.hostile.forge import (
    WEIGHTS,
    forge_weights,
    refused,
    reseal,
)


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
        ordered = sorted(
            (n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"]
        )
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


BAD_SHAPES: tuple[Any, ...] = (
    [8, 21],
    [168],
    [21, 8, 1],
    [-21, -8],
    [True, 168],
    [21.0, 8],
    ["21", 8],
    None,
    "ab",
    {},
    [2**62, 8],
    [2**63, 2],
    [2**32, 2**32],
    [10**40, 0],
    [21, 8] + [1] * 500_000,
    [2**61] * 300_000,
)
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
    "a tensor twice": lambda h, d: (
        b'{"a": {"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
        b' "a": {"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
        b"",
    ),
    "entry a list": lambda h, d: ({**h, "target.0.k.W": []}, d),
    "entry empty": lambda h, d: ({**h, "target.0.k.W": {}}, d),
    **{f"shape {s!r:.60}": tensor(shape=s) for s in BAD_SHAPES},
    **{f"dtype {t!r}": tensor(dtype=t) for t in BAD_DTYPES},
    **{
        f"offsets {o!r:.40}": tensor(data_offsets=o)
        for o in (
            [0, 0],
            [0, 2**63],
            [-672, 0],
            [672, 0],
            [0],
            [0, 672, 1],
            None,
            "ab",
            [0.0, 672.0],
            [False, 672],
            [1, 673],
            [10**30, 10**30 + 672],
        )
    },
    **{
        f"renamed {n!r:.40}": renamed(n)
        for n in (
            "target.0.k.w",
            "../../target.0.k.W",
            "/etc/passwd",
            "target.0.k.W\0",
            "target.0.\u212a.W",
            "TARGET.0.k.W",
            "",
            "target.00.k.W",
            "target.0.k.0.W",
            "x" * 100_000,
        )
    },
    **{
        f"extra {n!r:.40}": extra(n)
        for n in (
            "../evil",
            "/abs",
            "nul\0",
            "target.0.k.W ",
            "target.3.k.W",
            "Target.0.k.W",
            "\u202etarget",
            "__metadata__2",
        )
    },
    **{
        f"bias as {t}": other_dtype(t, s)
        for t, s in (
            ("I32", 4),
            ("I64", 8),
            ("U8", 1),
            ("BOOL", 1),
            ("F16", 2),
            ("BF16", 2),
            ("F64", 8),
        )
    },
    **{
        f"factor {n} as {t}": tensor(f"leverage.k.{n}", dtype=t)
        for n in ("mean", "directions")
        for t in ("I32", "F8_E4M3", "", None)
    },
    "factor in halves": tensor("leverage.k.mean", dtype="F16"),
    "factor of fewer rows": tensor("leverage.v.directions", shape=[8, 32]),
    "overlapping tensors": tensor("target.0.v.b", data_offsets=[0, 32]),
    "100 000 tensors": lambda h, d: (
        {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)},
        b"",
    ),
}


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


def poked(name, value):
    """A change of a weights file: the first number of a tensor."""

    def change(header, data):
        start = header[name]["data_offsets"][0]
        return header, data[:start] + struct.pack("<f", value) + data[start + 4 :]

    return change


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mean", float("nan")),
        ("directions", float("inf")),
        ("scale", float("nan")),
        ("scale", 0.0),
        ("scale", -1.0),
    ],
)
def test_factors_that_would_make_any_row_usual(asset, name, value):
    forge_weights(asset, poked(f"leverage.k.{name}", value))
    assert name in refused(asset)


@pytest.mark.parametrize("value", [0.0, 1e-30, 3e38])
def test_directions_without_a_length_are_refused(asset, value):
    """Every row would have the same leverage, and nothing would lie outside."""

    def change(header, data):
        (start, end), (rows, rank) = (
            header["leverage.v.directions"][n] for n in ("data_offsets", "shape")
        )
        numbers = torch.frombuffer(bytearray(data[start:end]), dtype=torch.float32).reshape(
            rows, rank
        )
        numbers[:, 1] = value
        return header, data[:start] + numbers.numpy().tobytes() + data[end:]

    forge_weights(asset, change)
    assert "leverage.v.directions" in refused(asset)


def test_ranges_that_do_not_hold_their_shapes_are_refused_by_the_header_alone():
    def read(first: list[int], second: list[int]) -> Header:
        said = {
            name: {"dtype": "F32", "shape": [2], "data_offsets": offsets}
            for name, offsets in (("a", first), ("b", second))
        }
        raw = json.dumps(said).encode()
        data = len(raw).to_bytes(8, "little") + raw + b"\0" * 16
        return read_safetensors_header(io.BytesIO(data), len(data), "file", max_tensors=2)

    assert read([0, 8], [8, 16]).tensors["b"] == ("F32", (2,), (8, 16))
    for first, second in (([0, 4], [4, 16]), ([0, 16], [16, 16]), ([8, 0], [0, 16])):
        with pytest.raises(CorruptFile, match="do not hold F32"):
            read(first, second)
