"""Safetensors headers, bounded and checked before any tensor is allocated. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvbridge.codec import parse_json
from kvbridge.errors import CorruptFile
from kvbridge.files import regular
from kvbridge.format import MAX_HEADER_BYTES, MAX_RANK


@dataclass(frozen=True)
class Header:
    """A safetensors header: metadata, and dtype, shape and byte range of each tensor."""

    metadata: dict[str, str]
    tensors: dict[str, tuple[str, tuple[int, ...], tuple[int, int]]]


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


def check_safetensors_header(
    path: Path, *, max_tensors: int, max_bytes: int | None = None
) -> Header:
    """Reads and checks a safetensors header alone. Raises CorruptFile.

    Checked before any tensor is allocated: header and file size, tensor count, dtypes, and byte ranges that follow
    one another without gap or overlap up to the file's end.
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
    """The header of an open file of `size` bytes, read from its start; raises CorruptFile naming `name`."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise CorruptFile(
            f"{name}: header of {length} bytes does not fit (file {size}, limit {MAX_HEADER_BYTES})"
        )
    body = parse_json(file.read(length), name)
    if not isinstance(body, dict):
        raise CorruptFile(f"{name}: expected a JSON object as header")
    metadata = body.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptFile(f"{name}: header metadata must map strings to strings")
    if len(body) > max_tensors:
        raise CorruptFile(f"{name}: {len(body)} tensors, more than the {max_tensors} allowed")
    tensors = {tensor: _header_entry(tensor, entry, name) for tensor, entry in body.items()}
    at = 0
    for start, stop in sorted(where for _, _, where in tensors.values()):
        if start != at:
            raise CorruptFile(f"{name}: tensors overlap or leave a gap at byte {at}")
        at = stop
    if at != size - 8 - length:
        raise CorruptFile(
            f"{name}: tensors end at byte {at}, data at {size - 8 - length} (truncated or padded)"
        )
    return Header(metadata, tensors)


def _header_entry(
    tensor: str, entry: Any, name: str
) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        count = 1
        for n in shape:
            if type(n) is not int or not 0 <= n < 1 << 63 or len(shape) > MAX_RANK:
                raise ValueError(f"shape {str(shape)[:80]}")
            count *= n
        if (
            type(start) is not int
            or type(stop) is not int
            or stop - start != count * _DTYPE_BYTES[dtype]
        ):
            raise ValueError(f"offsets {str((start, stop))[:80]} do not hold {dtype} {shape}")
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFile(
            f"{name}: tensor {tensor[:80]!r} is malformed: {str(error)[:200]}"
        ) from error
    return dtype, shape, (start, stop)
