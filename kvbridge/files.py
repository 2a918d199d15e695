"""Files and folders that are whole or absent, and digests that are checked. No torch."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from kvbridge.errors import AlreadyExists, CorruptFile
from kvbridge.format import MAX_SUMS_BYTES, SUMS

_SUM_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9][A-Za-z0-9._-]{0,99})")


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
    """Writes `files` plus SHA256SUMS as folder `path`, whole or not at all; returns the digest of
    SHA256SUMS.

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
    """Checks a published folder against its SHA256SUMS, reading every byte; returns the folder's
    digest.

    It holds exactly the `required` files and their list. Raises CorruptFile: a file missing, added,
    linked, renamed or changed.
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
    regular(sums_path)
    try:
        if sums_path.stat().st_size > MAX_SUMS_BYTES:
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
        actual = file_digest(path / name)
        if actual != expected:
            raise CorruptFile(
                f"{path / name}: SHA-256 is {actual}, expected {expected}; fetch or fit it again"
            )
    return hashlib.sha256(raw).hexdigest()


def parse_sums(raw: bytes, name: str) -> dict[str, str]:
    """File name → SHA-256 of a SHA256SUMS; names are plain, never paths. Raises CorruptFile naming
    `name`.

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
    regular(path)
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CorruptFile(f"{path}: cannot be read: {error.strerror}") from error


def regular(path: Path) -> None:
    """Raises CorruptFile for what is not a file: opening a pipe would wait for ever, a device would
    never end."""
    try:
        sound = stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{str(path)[:200]!r}: cannot be read: {type(error).__name__}") from error
    if not sound:
        raise CorruptFile(f"{path}: expected a regular file")


def stands_already(path: Path, files: Mapping[str, bytes]) -> bool:
    """Whether exactly `files` were published at `path`, False where nothing is; raises
    AlreadyExists for other content."""
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
        f"{path}: something else stands there already; assets are never overwritten, "
        "choose another path"
    )
