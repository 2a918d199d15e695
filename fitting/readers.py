"""Rows out of one file, each with its place: what stands there as it stands there.

Nothing is guessed, so that an answer `007` or `2021-05-03` stays text; nothing is written, so that
no cache folder is needed; and a row that cannot be read is an `Unreadable` in its place, so that
those after it still are.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from kvbridge.errors import DataError
from kvbridge.fitting.folders import FORMATS, suffix_of
from kvbridge.fitting.json_rows import (
    CHUNK,
    NOT_UTF8,
    PlacedRows,
    Unreadable,
    json_document,
    json_lines,
    lone_surrogate,
    parsed,
)

BATCH_ROWS = 64
"""Rows of a column format that become Python objects at once."""
LONGEST_CELL = 2**31 - 1
OTHER_UNICODE = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
"""How files in UTF-16 and UTF-32 begin."""
JSON_COLUMNS = ("answers", "options", "messages")
"""Columns of a table of text whose cells may hold a JSON list or object."""


def read_rows(file: Path) -> PlacedRows:
    """Rows of one file with their places (`line 7`); what cannot be read is `Unreadable`. Raises
    DataError for text that is no UTF-8 from the start."""
    suffix = suffix_of(file)
    kind = FORMATS[suffix.removesuffix(".gz")]
    try:
        with open(file, "rb") as raw:
            if kind in COLUMN_READERS:
                yield from COLUMN_READERS[kind](raw)
            else:
                with _text(raw, file, packed=suffix.endswith(".gz")) as stream:
                    yield from TEXT_READERS[suffix.removesuffix(".gz")](stream)
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        yield "the rest", Unreadable(f"cannot be read as {kind}: {error}", rest=True)


@contextmanager
def _text(raw: BinaryIO, file: Path, *, packed: bool) -> Iterator[TextIO]:
    """The file's text: no byte order mark, every line end a \\n, bytes that are no UTF-8 as lone
    surrogates."""
    source: Any = gzip.GzipFile(fileobj=raw) if packed else raw
    if source.peek(4).startswith(OTHER_UNICODE):
        raise DataError(f"{file}: expected UTF-8, found UTF-16 or UTF-32; save it as UTF-8")
    with io.TextIOWrapper(source, encoding="utf-8-sig", errors="surrogateescape") as stream:
        yield stream


def _comma_table(stream: TextIO) -> PlacedRows:
    """Rows under a header, between commas; between semicolons where the header has those alone."""
    header = stream.readline()
    delimiter = ";" if ";" in header and "," not in header else ","
    return _table(itertools.chain([header], stream), delimiter)


def _tab_table(stream: TextIO) -> PlacedRows:
    return _table(stream, "\t")


def _table(lines: Iterator[str] | TextIO, delimiter: str) -> PlacedRows:
    """Every cell as text; an empty one is null."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header = _record(reader)
    if header is None:
        return
    if isinstance(header, Unreadable) or len(set(header)) < len(header):
        yield "line 1", Unreadable("expected a header with different names", rest=True)
        return
    while True:
        line = reader.line_num + 1
        record = _record(reader)
        if record is None:
            return
        if record == []:
            continue
        if isinstance(record, Unreadable):
            yield f"line {line}", record
        elif len(record) != len(header):
            reason = f"expected {len(header)} cells, found {len(record)}"
            yield f"line {line}", Unreadable(reason)
        else:
            yield f"line {line}", _typed(dict(zip(header, record, strict=True)))


def _record(reader: Any) -> list[str] | Unreadable | None:
    """The next record; None at the end. A cell may be as long as a document."""
    before = csv.field_size_limit(LONGEST_CELL)
    try:
        record = next(reader, None)
    except csv.Error as error:
        return Unreadable(f"cannot be read as csv: {error}")
    finally:
        csv.field_size_limit(before)
    if record is not None and lone_surrogate("".join(record)):
        return Unreadable(NOT_UTF8)
    return record


def _typed(cells: dict[str, str]) -> dict[str, Any] | Unreadable:
    """A record as a row: text, but for what an evaluation reads as a number or as a list."""
    row: dict[str, Any] = {name: cell if cell else None for name, cell in cells.items()}
    label, chance = row.get("label"), row.get("chance")
    if label is not None and re.fullmatch(r"\d{1,9}", label):
        row["label"] = int(label)
    if chance is not None and re.fullmatch(r"\d*\.?\d+", chance):
        row["chance"] = float(chance)
    for name in JSON_COLUMNS:
        cell = row.get(name)
        if cell is not None and cell.lstrip().startswith(("[", "{")):
            value = parsed(cell)
            if isinstance(value, Unreadable):
                return Unreadable(f"expected JSON in column {name}, found {cell!r:.60}")
            row[name] = value
    return row


def _paragraphs(stream: TextIO) -> PlacedRows:
    """Text between empty lines."""
    rest, line = "", 1
    while True:
        chunk = stream.read(CHUNK)
        *whole, rest = (rest + chunk).split("\n\n")
        for paragraph in whole if chunk else [*whole, rest]:
            if paragraph:
                usable = not lone_surrogate(paragraph)
                yield f"line {line}", {"text": paragraph} if usable else Unreadable(NOT_UTF8)
            line += paragraph.count("\n") + 2
        if not chunk:
            return


def _parquet(raw: BinaryIO) -> PlacedRows:
    yield from _numbered(pq.ParquetFile(raw).iter_batches(batch_size=BATCH_ROWS))


def _arrow(raw: BinaryIO) -> PlacedRows:
    """A stream of record batches, as `save_to_disk` writes it, or a file of them."""
    try:
        batches = iter(pa.ipc.open_stream(raw))
    except pa.ArrowInvalid:
        raw.seek(0)
        opened = pa.ipc.open_file(raw)
        batches = (opened.get_batch(number) for number in range(opened.num_record_batches))
    yield from _numbered(batches)


def _numbered(batches: Iterator[pa.RecordBatch]) -> PlacedRows:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            for row in _objects(batch.slice(start, BATCH_ROWS)):
                number += 1
                yield f"row {number}", row


def _objects(batch: pa.RecordBatch) -> list[Any]:
    """Rows of a batch; one by one where a text among them is no UTF-8."""
    try:
        return [plain(row) for row in batch.to_pylist()]
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [Unreadable(NOT_UTF8)]
    return [_objects(batch.slice(number, 1))[0] for number in range(batch.num_rows)]


def plain(value: Any) -> Any:
    """A value with dates and times as text, as their columns would show them: `2021-05-03`, with
    the time of day only where there is one."""
    if isinstance(value, datetime):
        return value.date().isoformat() if value.time() == time() else value.isoformat(sep=" ")
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, list) and value and not isinstance(value[0], str | int | float):
        return [plain(entry) for entry in value]
    return value


COLUMN_READERS: dict[str, Callable[[BinaryIO], PlacedRows]] = {"parquet": _parquet, "arrow": _arrow}
TEXT_READERS: dict[str, Callable[[TextIO], PlacedRows]] = {
    ".jsonl": json_lines,
    ".json": json_document,
    ".csv": _comma_table,
    ".tsv": _tab_table,
    ".txt": _paragraphs,
}
