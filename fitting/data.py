"""Texts for a fit: documents with ids, from files, folders, Hub datasets or plain Python."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvbridge.errors import DataError

SPLITS = ("train", "validation", "test")
LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
READERS = tuple(
    f"datasets.packaged_modules.{kind}.{kind}" for kind in sorted(set(LOADERS.values()))
)
"""Loggers of the readers."""


@dataclass(frozen=True)
class Document:
    """One text. `id` is its own, `group` the document it is from (splits and clusters never cut a
    group)."""

    id: str
    text: str
    group: str
    split: str | None = None


def read_documents(source: Any) -> Iterator[Document]:
    """Documents out of a path, a Hub dataset id, or an iterable of strings, mappings or Documents;
    streamed.

    Files: `.jsonl` and `.parquet` rows with `text` (and `document`, `id`, `split`), `.txt`
    paragraphs; a folder of them, where train.*, validation.* and test.* name splits. Raises
    DataError, naming what was found.
    """
    if isinstance(source, (str, Path)):
        rows = stream_rows(str(source))
    elif isinstance(source, Iterable) and not isinstance(source, (Mapping, bytes)):
        rows = ((None, "texts", row) for row in source)
    else:
        raise DataError(
            "expected a path, a Hub dataset id or an iterable of texts, "
            f"found {type(source).__name__}"
        )
    seen: set[str] = set()
    for index, (split, name, row) in enumerate(rows):
        document = _document(row, split, f"{name}#{index}")
        if document.id in seen:
            raise DataError(f"{name}: document id {document.id!r} stands twice")
        seen.add(document.id)
        if document.text.strip():
            yield document


def stream_rows(source: str) -> Iterator[tuple[str | None, str, Any]]:
    """(split or None, file or dataset name, row) out of a file, a folder or a Hub dataset id;
    raises DataError."""
    from datasets import load_dataset

    if files := _files(source):
        for file in files:
            kind = LOADERS[file.suffix]
            extra = {"sample_by": "paragraph"} if kind == "text" else {}
            read = partial(
                load_dataset, kind, data_files=str(file), split="train", streaming=True, **extra
            )
            for row in _streamed(read, f"{file}: cannot be read as {kind}"):
                yield (file.stem if file.stem in SPLITS else None), file.name, row
        return

    def fetch() -> Iterator[tuple[str, Any]]:
        for split, rows in load_dataset(source, streaming=True).items():
            for row in rows:
                yield split, row

    for split, row in _streamed(fetch, f"{source}: not a file here, and the Hub did not give it"):
        yield (split if split in SPLITS else None), source, row


def _files(source: str) -> list[Path]:
    """Files to read, in order: those named after splits where there are any; none for a Hub dataset
    id. Raises DataError for what is neither, and for files that are empty or may not be read."""
    path = Path(source)
    if not source or not path.exists():
        if source.count("/") != 1 or source.startswith((".", "/", "~")) or path.suffix in LOADERS:
            raise DataError(
                f"{source}: no such file or folder, and not a Hub dataset id (org/name)"
            )
        return []
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        raise DataError(f"{path}: expected a folder that may be read")
    files = sorted(p for p in path.iterdir() if p.suffix in LOADERS) if path.is_dir() else [path]
    if not files or files[0].suffix not in LOADERS:
        present = "none" if path.is_dir() else path.suffix or "no suffix"
        raise DataError(
            f"{path}: expected a {', '.join(LOADERS)} file or a folder of them, found {present}"
        )
    files = [f for f in files if f.stem in SPLITS] or files
    for file in files:
        if not os.access(file, os.R_OK):
            raise DataError(f"{file}: expected a file that may be read")
        if file.stat().st_size == 0:
            raise DataError(f"{file}: expected texts, found an empty file")
    return files


def check_data(source: str) -> None:
    """Raises DataError, before a model is loaded for it, where data on this machine is missing,
    empty, not readable, or does not begin with a document; for every file named after a split, else
    the first. A Hub dataset id is not looked up."""
    files = _files(source)
    for file in files if files and files[0].stem in SPLITS else files[:1]:
        first = next(read_documents(file), None)
        if first is None:
            raise DataError(f"{file}: expected texts, found none that is not empty")


@contextmanager
def _without_logs() -> Iterator[None]:
    """Keeps the readers of `datasets` from logging what they raise anyway; whatever else logs is
    left alone."""
    loggers = [logging.getLogger(name) for name in READERS]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def _streamed(load: Callable[[], Iterable[Any]], what: str) -> Iterator[Any]:
    """Rows of `load()`; what the readers raise on missing or malformed data becomes a DataError
    that begins with `what`."""
    try:
        with _without_logs():
            rows, end = iter(load()), object()
        while True:
            with _without_logs():
                row = next(rows, end)
            if row is end:
                return
            yield row
    except (OSError, ValueError) as error:
        raise DataError(f"{what}: {error}") from error


def _document(row: Any, split: str | None, fallback: str) -> Document:
    """A row as a Document; `fallback` names it where it has no id of its own."""
    if isinstance(row, Document):
        _check_split(row.split, row.id)
        return row
    if isinstance(row, str):
        return Document(fallback, row, fallback, split)
    text = _running_text(row) if isinstance(row, Mapping) else None
    if text is None:
        columns = type(row).__name__
        if isinstance(row, Mapping):
            columns = ", ".join(name for name, value in row.items() if value is not None)
        raise DataError(
            f"{fallback}: expected a row with text, or with context, question and answer, "
            f"found {columns}"
        )
    identity, group = row_names(row, fallback)
    named = row.get("split")
    _check_split(named, fallback)
    return Document(identity, text, group, named or split)


def row_names(row: Mapping[str, Any], fallback: str) -> tuple[str, str]:
    """A row's id, `fallback` where it has none, and the document it is from, else its id."""
    own, document = row.get("id"), row.get("document")
    identity = fallback if own in (None, "") else str(own)
    return identity, identity if document in (None, "") else str(document)


def _check_split(split: Any, name: str) -> None:
    """Raises DataError for a split that is stated and none of SPLITS."""
    if split is not None and split not in SPLITS:
        raise DataError(f"{name}: expected split to be one of {', '.join(SPLITS)}, found {split!r}")


def _running_text(row: Mapping[str, Any]) -> str | None:
    """What a row says: its text, or a question as it stands with its (first) answer; None where it
    says nothing."""
    if isinstance(row.get("text"), str):
        return row["text"]
    asked = [row.get("prompt")]
    if not isinstance(asked[0], str):
        asked = [row.get("context"), row.get("question")]
    question = "".join(part for part in asked if isinstance(part, str))
    several = row.get("answers")
    answer = several[0] if isinstance(several, (list, tuple)) and several else row.get("answer")
    return question + (answer if isinstance(answer, str) else "") if question else None
