"""Files that are whole or absent, digests that are checked, and headers bounded before anything is allocated. No torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvbridge.errors import AlreadyExists, CorruptFile

MAX_HEADER_BYTES = 16 << 20
MAX_JSON_BYTES = 16 << 20
MAX_JSON_DEPTH = 64
MAX_JSON_VALUES = 1 << 20
MAX_RANK = 8
SUMS = "SHA256SUMS"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SUM_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9][A-Za-z0-9._-]{0,99})")


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
    _regular(path)
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


def parse_json(raw: bytes, name: str) -> object:
    """JSON without duplicate keys, NaN, infinities, lone surrogates or bad UTF-8; raises CorruptFile naming `name`.

    The number of values is bounded by MAX_JSON_VALUES before anything is built: a few bytes of text would
    otherwise become a hundred bytes of objects each.
    """

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key stands twice")
        return found

    def refuse(constant: str) -> object:
        raise ValueError(f"{constant} is not allowed")

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"{text[:40]} is out of range")
        return value

    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_JSON_VALUES:
        raise CorruptFile(f"{name}: more than {MAX_JSON_VALUES} JSON values")
    try:
        text = raw.decode("utf-8")
        body = json.loads(text, object_pairs_hook=once, parse_constant=refuse, parse_float=finite)
        if _SURROGATE.search(text):
            json.dumps(body, ensure_ascii=False).encode()
        if _is_deeper(body, MAX_JSON_DEPTH):
            raise ValueError(f"nested more than {MAX_JSON_DEPTH} deep")
        return body
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{name}: not valid JSON: {str(error)[:200]}") from error


def _is_deeper(body: object, limit: int) -> bool:
    """Whether lists and objects stand more than `limit` deep in each other."""
    level = [body]
    for _ in range(limit + 1):
        level = [
            value
            for x in level
            if isinstance(x, (dict, list))
            for value in ((*x.values(), None) if isinstance(x, dict) else (*x, None))
        ]
        if not level:
            return False
    return True


def read_json(path: Path) -> object:
    """A JSON file of bounded size; raises CorruptFile."""
    _regular(path)
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CorruptFile(
                f"{path}: {size} bytes of JSON, more than the {MAX_JSON_BYTES} allowed"
            )
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CorruptFile(f"{path}: cannot be read: {error.strerror}") from error


def write_file(path: Path, data: bytes) -> None:
    """Writes `data` under a temporary name, syncs it, renames it to `path` and syncs the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """fsync of a directory, so that names in it survive power loss."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish_folder(path: Path, files: Mapping[str, bytes]) -> str:
    """Writes `files` plus SHA256SUMS as folder `path`, whole or not at all; returns the digest of SHA256SUMS.

    Publishing the same content again changes nothing; other content at `path` raises AlreadyExists.
    """
    sums = sums_of({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})
    digest = hashlib.sha256(sums).hexdigest()
    if stands_already(path, files):
        return digest
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    temporary.mkdir()
    try:
        for name, data in {**files, SUMS: sums}.items():
            with (temporary / name).open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        sync_folder(temporary)
        try:
            os.rename(temporary, path)
        except OSError:
            if stands_already(path, files):
                return digest
            raise
        sync_folder(path.parent)
    finally:
        remove_folder(temporary)
    return digest


def remove_folder(path: Path) -> None:
    """Removes a flat folder of ours if it is there; follows no links."""
    if path.is_dir() and not path.is_symlink():
        for entry in path.iterdir():
            entry.unlink()
        path.rmdir()


def verify_folder(path: Path, *, required: frozenset[str]) -> str:
    """Checks a published folder against its SHA256SUMS, reading every byte; returns the folder's digest.

    It holds exactly the `required` files and their list. Raises CorruptFile: a file missing, added, linked, renamed or
    changed.
    """
    try:
        present = {entry.name for entry in path.iterdir()}
    except (OSError, ValueError) as error:
        wanted, missing = ", ".join(sorted(required)), isinstance(error, FileNotFoundError)
        what = (
            "no such folder"
            if missing
            else getattr(error, "strerror", None) or type(error).__name__
        )
        raise CorruptFile(
            f"{str(path)[:200]!r}: expected a folder with {wanted}, found {what}"
        ) from error
    if present != required | {SUMS}:
        odd = ", ".join(ascii(name)[:80] for name in sorted(present ^ (required | {SUMS}))[:5])
        raise CorruptFile(
            f"{path}: expected {', '.join(sorted(required | {SUMS}))} and nothing else: {odd}"
        )
    sums_path = path / SUMS
    if sums_path.is_symlink():
        raise CorruptFile(f"{sums_path}: expected a regular file, found a link")
    _regular(sums_path)
    try:
        if sums_path.stat().st_size > 1 << 16:
            raise CorruptFile(f"{sums_path}: too large to be a list of sums")
        raw = sums_path.read_bytes()
    except OSError as error:
        raise CorruptFile(f"{sums_path}: cannot be read: {error.strerror}") from error
    listed = parse_sums(raw, str(sums_path))
    if set(listed) != required:
        raise CorruptFile(
            f"{sums_path}: expected to list {', '.join(sorted(required))} and nothing else"
        )
    for name, expected in listed.items():
        found = file_digest(path / name)
        if found != expected:
            raise CorruptFile(
                f"{path / name}: SHA-256 is {found}, expected {expected}; fetch or fit it again"
            )
    return hashlib.sha256(raw).hexdigest()


def parse_sums(raw: bytes, name: str) -> dict[str, str]:
    """File name → SHA-256 of a SHA256SUMS; names are plain, never paths. Raises CorruptFile naming `name`.

    Only the form that `sums_of` writes is taken: the same files have one digest.
    """
    listed: dict[str, str] = {}
    for line in raw.decode("ascii", "replace").removesuffix("\n").split("\n"):
        match = _SUM_LINE.fullmatch(line)
        if match is None or match[2] in listed:
            raise CorruptFile(f"{name}: malformed or repeated line {line[:120]!r}")
        listed[match[2]] = match[1]
    if sums_of(listed) != raw:
        raise CorruptFile(f"{name}: expected lines sorted by name, each ended by a newline")
    return listed


def folder_digest(files: Mapping[str, bytes]) -> str:
    """The digest that `files` have once published: that of their SHA256SUMS."""
    sums = sums_of({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})
    return hashlib.sha256(sums).hexdigest()


def sums_of(digests: Mapping[str, str]) -> bytes:
    """The SHA256SUMS that lists file name → SHA-256."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())).encode()


def file_digest(path: Path) -> str:
    """SHA-256 of a regular file; raises CorruptFile for links, folders and unreadable files."""
    if path.is_symlink():
        raise CorruptFile(f"{path}: expected a regular file, found a link")
    _regular(path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CorruptFile(f"{path}: cannot be read: {error.strerror}") from error


def _regular(path: Path) -> None:
    """Raises CorruptFile for what is not a file: opening a pipe would wait for ever, a device would never end."""
    try:
        sound = stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{str(path)[:200]!r}: cannot be read: {type(error).__name__}") from error
    if not sound:
        raise CorruptFile(f"{path}: expected a regular file")


def stands_already(path: Path, files: Mapping[str, bytes]) -> bool:
    """Whether exactly `files` were published at `path`, False where nothing is; raises AlreadyExists for other content."""
    if not os.path.lexists(path) or (
        path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    ):
        return False
    try:
        if verify_folder(path, required=frozenset(files)) == folder_digest(files):
            return True
    except CorruptFile:
        pass
    raise AlreadyExists(
        f"{path}: something else stands there already; assets are never overwritten, choose another path"
    )
