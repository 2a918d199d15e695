"""Safetensors headers, bounded and checked before any tensor is allocated. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

from msgspec import Meta

from kvbridge import codec
from kvbridge.codec import Index
from kvbridge.errors import CorruptFile
from kvbridge.files import regular
from kvbridge.format import MAX_HEADER_BYTES, MAX_RANK, METADATA_KEY

_DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class Header:
    """A safetensors header: metadata, and dtype, shape and byte range of each tensor."""

    metadata: dict[str, str]
    tensors: dict[str, tuple[str, tuple[int, ...], tuple[int, int]]]


@dataclass(frozen=True)
class TensorEntry:
    """What a header says of one tensor."""

    dtype: Annotated[str, codec.one_of(*_DTYPE_BYTES)]
    shape: Annotated[tuple[Index, ...], Meta(max_length=MAX_RANK)]
    data_offsets: tuple[Index, Index]

    def __post_init__(self) -> None:
        start, stop = self.data_offsets
        if stop - start != math.prod(self.shape) * _DTYPE_BYTES[self.dtype]:
            raise ValueError(f"offsets {start}, {stop} do not hold {self.dtype} {self.shape}")


def check_safetensors_header(
    path: Path, *, max_tensors: int, max_bytes: int | None = None
) -> Header:
    """Reads and checks a safetensors header alone. Raises CorruptFile.

    Checked before any tensor is allocated: header and file size, tensor count, dtypes, and byte
    ranges that follow one another without gap or overlap up to the file's end.
    """
    regular(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if max_bytes is not None and size > max_bytes:
                raise CorruptFile(f"{path}: {size} bytes, more than the {max_bytes} announced")
            return read_safetensors_header(file, size, str(path), max_tensors=max_tensors)
    except OSError as error:
        raise CorruptFile(f"{path}: cannot be read: {error.strerror}") from error


def read_safetensors_header(file: BinaryIO, size: int, name: str, *, max_tensors: int) -> Header:
    """The header of an open file of `size` bytes, read from its start; raises CorruptFile naming
    `name`."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise CorruptFile(
            f"{name}: header of {length} bytes does not fit (file {size}, limit {MAX_HEADER_BYTES})"
        )
    body = codec.parse_json(file.read(length), name)
    if not isinstance(body, dict):
        raise CorruptFile(f"{name}: expected a JSON object as header")
    metadata = codec.convert(body.pop("__metadata__", {}), dict[str, str], f"{name}: metadata")
    if len(body) > max_tensors:
        raise CorruptFile(f"{name}: {len(body)} tensors, more than the {max_tensors} allowed")
    tensors = {}
    for tensor, said in body.items():
        entry = codec.convert(said, TensorEntry, f"{name}: tensor {tensor[:80]!r}")
        tensors[tensor] = (entry.dtype, entry.shape, entry.data_offsets)
    _check_ranges([where for _, _, where in tensors.values()], size - 8 - length, name)
    return Header(metadata, tensors)


def _check_ranges(ranges: list[tuple[int, int]], data_bytes: int, name: str) -> None:
    """Raises CorruptFile unless the ranges follow one another from 0 to `data_bytes`."""
    at = 0
    for start, stop in sorted(ranges):
        if start != at:
            raise CorruptFile(f"{name}: tensors overlap or leave a gap at byte {at}")
        at = stop
    if at != data_bytes:
        raise CorruptFile(
            f"{name}: tensors end at byte {at}, data at {data_bytes} (truncated or padded)"
        )


def expect_tensors(
    header: Header, shapes: Mapping[str, tuple[int, ...]], owner: str, name: str
) -> None:
    """Raises CorruptFile unless the header holds exactly tensors of these names and shapes, which
    the `owner` (`the manifest`) announces."""
    held = {tensor: shape for tensor, (_, shape, _) in header.tensors.items()}
    if held != shapes:
        names = held.keys() | shapes.keys()
        odd = sorted(ascii(t)[1:81] for t in names if held.get(t) != shapes.get(t))
        raise CorruptFile(f"{name}: tensors do not match {owner}: {', '.join(odd[:4])}")


def expect_binding(header: Header, binding: str, owner: str, name: str) -> None:
    """Raises CorruptFile unless the metadata carries the digest of what describes these tensors,
    the `owner` (`this manifest`): equal shapes are no proof."""
    if header.metadata != {METADATA_KEY: binding}:
        raise CorruptFile(f"{name}: these tensors are not of {owner}; fetch or make it again")
