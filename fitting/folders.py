"""Which files a path names, and which split each is of: exactly these, never what its characters
might match as a pattern."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbridge.errors import DataError

SPLITS = ("train", "validation", "test")
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
"""How splits are called, in any case."""
FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
PACKED = (".jsonl", ".json", ".csv", ".tsv", ".txt")
"""Suffixes that may have `.gz` behind them."""
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""What `datasets` writes beside its rows."""
SAVED_STATE = "state.json"
"""Names the files of one dataset that was saved with `save_to_disk`."""

_ALIASES = "|".join(SPLIT_NAMES)
SPLIT_FILE = re.compile(rf"(?i)({_ALIASES})(?:[-_.]\d+)?$")
"""`train`, `train-00003`, `train_3`."""
SHARD_FILE = re.compile(rf"(?i)(?:.*[-_.])?({_ALIASES})-\d+-of-\d+(?:-[0-9a-f]+)?$")
"""`train-00000-of-00004`, with the dataset's name before it or a hash behind it."""


@dataclass(frozen=True)
class SourceFile:
    """One file to read. `name`: as rows without an id are called by, its path inside the folder."""

    path: Path
    name: str
    split: str | None


def split_named(name: object) -> str | None:
    """The split that a name stands for, in any case; None where it is none."""
    return SPLIT_NAMES.get(name.lower()) if isinstance(name, str) else None


def suffix_of(path: Path) -> str:
    """`.jsonl` or `.jsonl.gz` and the like, in lower case; what the path ends in where that is no
    format."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return Path(path.stem).suffix.lower() + suffix
    return suffix


def is_data(path: Path) -> bool:
    """Whether a file's name says that it holds rows."""
    suffix = suffix_of(path)
    return suffix in FORMATS or (suffix.endswith(".gz") and suffix.removesuffix(".gz") in PACKED)


def files_of(source: str) -> list[SourceFile]:
    """Files to read, in order: those named after splits where there are any; none for a Hub dataset
    id.

    A folder's subfolders are read, too; one that is named after a split gives it to its files.
    Raises DataError for what is neither, and for files that are empty or may not be read.
    """
    path = Path(source)
    if not source or not os.path.lexists(path):
        if source.count("/") != 1 or source.startswith((".", "/", "~")) or is_data(path):
            raise DataError(
                f"{source}: no such file or folder, and not a Hub dataset id (org/name)"
            )
        return []
    if path.is_dir():
        files = [_source_file(path, inside) for inside in sorted(_inside(path))]
    else:
        files = [SourceFile(path, path.name, _split_of_name(path))] if is_data(path) else []
    if not files:
        present = "none" if path.is_dir() else suffix_of(path) or "no suffix"
        raise DataError(
            f"{path}: expected a {', '.join(FORMATS)} file ({', '.join(PACKED)} also with .gz) or "
            f"a folder of them, found {present}"
        )
    files = [file for file in files if file.split is not None] or files
    for file in files:
        if not file.path.is_file() or not os.access(file.path, os.R_OK):
            raise DataError(f"{file.path}: expected a file that may be read")
        if file.path.stat().st_size == 0:
            raise DataError(f"{file.path}: expected texts, found an empty file")
    return files


def _source_file(root: Path, inside: Path) -> SourceFile:
    split = _split_of_name(inside)
    for folder in reversed(inside.parts[:-1]):
        split = split or split_named(folder)
    return SourceFile(root / inside, inside.as_posix(), split)


def _split_of_name(path: Path) -> str | None:
    stem = path.name[: len(path.name) - len(suffix_of(path))]
    match = SPLIT_FILE.match(stem) or SHARD_FILE.match(stem)
    return split_named(match[1]) if match else None


def _inside(root: Path) -> Iterator[Path]:
    """Paths of data files below `root`, relative to it; what is hidden is left out."""
    visited: set[str] = set()

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: expected a folder that may be read") from error

    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        # A link may lead back to a folder above it.
        real = os.path.realpath(folder)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        if not os.access(folder, os.R_OK | os.X_OK):
            raise DataError(f"{folder}: expected a folder that may be read")
        here = Path(folder)
        saved = _saved_files(here) if SAVED_STATE in names else None
        for name in names if saved is None else saved:
            path = here / name
            if is_data(path) and name not in DESCRIPTIONS and not name.startswith("."):
                yield path.relative_to(root)


def _saved_files(folder: Path) -> list[str] | None:
    """Data files of a dataset that was saved with `save_to_disk`; None for a `state.json` of
    anything else."""
    try:
        state = json.loads((folder / SAVED_STATE).read_text("utf-8"))
        return [str(entry["filename"]) for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError, OSError):
        return None
