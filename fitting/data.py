"""Texts for a fit: documents with ids, from files, folders, Hub datasets or plain Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from kvbridge.errors import DataError
from kvbridge.fitting.folders import SPLITS, files_of, split_named
from kvbridge.fitting.hub_rows import hub_rows
from kvbridge.fitting.json_rows import Unreadable, lone_surrogate
from kvbridge.fitting.readers import read_rows
from kvbridge.fitting.skipped import Skipped

EXPECTED = "expected a row with text, or with context, question and answer"


@dataclass(frozen=True)
class Document:
    """One text. `id` is its own, `group` the document it is from (splits and clusters never cut a
    group)."""

    id: str
    text: str
    group: str
    split: str | None = None


class SourceRow(NamedTuple):
    """A row as it stands in its source. `name`: of the file or dataset; `place`: where in it; a
    `value` that cannot be read is Unreadable."""

    split: str | None
    name: str
    place: str
    value: Any


def read_documents(source: Any, skipped: Skipped | None = None) -> Iterator[Document]:
    """Documents out of a path, a Hub dataset id, or an iterable of strings, mappings or Documents;
    streamed.

    Files: rows with `text` (and `document`, `id`, `split`), questions with their answer, or chats
    (`messages`: their contents, one under the other); `.txt` paragraphs; a folder of files, where
    names say the split. A row that cannot be used is left out and counted in `skipped` (modified);
    DataError says so where they are too many, and what the source is where it cannot be read.
    """
    skipped = skipped or Skipped()
    if isinstance(source, (str, Path)):
        rows = stream_rows(str(source))
    elif isinstance(source, Iterable) and not isinstance(source, (Mapping, bytes, Tensor)):
        rows = _given(source)
    else:
        raise DataError(
            "expected a path, a Hub dataset id or an iterable of texts, "
            f"found {type(source).__name__}"
        )
    seen: set[str] = set()
    for index, row in enumerate(rows):
        skipped.read()
        try:
            document = _document(row, f"{row.name}#{index}")
            if document.id in seen:
                raise DataError(f"document id {document.id!r} stands twice")
        except DataError as error:
            skipped.add(row.place, str(error))
            continue
        seen.add(document.id)
        if document.text.strip():
            yield document
    skipped.close()


def _given(rows: Iterable[Any]) -> Iterator[SourceRow]:
    for index, row in enumerate(rows):
        yield SourceRow(None, "texts", f"texts#{index}", row)


def stream_rows(source: str) -> Iterator[SourceRow]:
    """Rows of a file, a folder or a Hub dataset id; raises DataError where a file cannot be read
    from its beginning."""
    files = files_of(source)
    if not files:
        for split, value in hub_rows(source):
            yield SourceRow(split_named(split), source, source, value)
        return
    # A file that is broken from its beginning is no matter of a row: said before any other file
    # has been worked on.
    for file in files:
        for _, value in read_rows(file.path):
            if isinstance(value, Unreadable) and value.rest:
                raise DataError(f"{file.path}: {value.reason}")
            break
    for file in files:
        for place, value in read_rows(file.path):
            yield SourceRow(file.split, file.name, f"{file.name} {place}", value)


def check_data(source: str) -> None:
    """Raises DataError, before a model is loaded for it, where data on this machine is missing,
    empty, not readable, or does not begin with a document; for every file named after a split, else
    the first. A Hub dataset id is not looked up."""
    files = files_of(source)
    for file in files if files and files[0].split is not None else files[:1]:
        first = next(read_documents(file.path), None)
        if first is None:
            raise DataError(f"{file.path}: expected texts, found none that is not empty")


def _document(source: SourceRow, fallback: str) -> Document:
    """A row as a Document; `fallback` names it where it has no id of its own. Raises DataError for
    a row that cannot be used."""
    row = source.value
    if isinstance(row, Unreadable):
        raise DataError(row.reason)
    if isinstance(row, Document):
        split = _split_of(row.split)
        document = row if split == row.split else replace(row, split=split)
    elif isinstance(row, str):
        document = Document(fallback, row, fallback, source.split)
    else:
        document = _document_of_columns(row, source.split, fallback)
    if lone_surrogate(document.text):
        raise DataError("expected text, found half a character (a lone surrogate)")
    return document


def _document_of_columns(row: Any, split: str | None, fallback: str) -> Document:
    text = _running_text(row) if isinstance(row, Mapping) else None
    if text is None:
        columns = type(row).__name__
        if isinstance(row, Mapping):
            columns = ", ".join(str(name) for name, value in row.items() if value is not None)
        raise DataError(f"{EXPECTED}, found {columns or 'nothing but null'}")
    identity, group = row_names(row, fallback)
    return Document(identity, text, group, _split_of(row.get("split")) or split)


def row_names(row: Mapping[str, Any], fallback: str) -> tuple[str, str]:
    """A row's id, `fallback` where it has none, and the document it is from, else its id."""
    own, document = row.get("id"), row.get("document")
    identity = fallback if own in (None, "") else str(own)
    return identity, identity if document in (None, "") else str(document)


def _split_of(stated: Any) -> str | None:
    """The split that a row states, None where it states none; raises DataError for another
    name."""
    split = split_named(stated)
    if stated is not None and split is None:
        raise DataError(f"expected split to be one of {', '.join(SPLITS)}, found {stated!r}")
    return split


def answer_texts(value: Any) -> tuple[Any, ...]:
    """Accepted answers as they stand: one text, a list, or SQuAD's `{"text": […], "answer_start":
    […]}` (one, or a list of them)."""
    if isinstance(value, Mapping):
        return answer_texts(value.get("text"))
    if isinstance(value, list | tuple):
        return tuple(text for entry in value for text in answer_texts(entry))
    return () if value is None else (value,)


def _running_text(row: Mapping[str, Any]) -> str | None:
    """What a row says: its text, a question as it stands with its (first) answer, or the contents
    of a chat; None where it says nothing."""
    if isinstance(row.get("text"), str):
        return row["text"]
    asked = [row.get("prompt")]
    if not isinstance(asked[0], str):
        asked = [row.get("context"), row.get("question")]
    question = "".join(part for part in asked if isinstance(part, str))
    if not question:
        return _chat_text(row.get("messages"))
    answers = answer_texts(row.get("answers")) or answer_texts(row.get("answer"))
    return question + (answers[0] if answers and isinstance(answers[0], str) else "")


def _chat_text(messages: Any) -> str | None:
    """Contents of a chat's messages, one under the other, without roles or any template; None where
    there are none."""
    contents = []
    for message in messages if isinstance(messages, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list | tuple) else [content]
        for part in parts:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str) and text:
                contents.append(text)
    return "\n".join(contents) or None
