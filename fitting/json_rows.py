"""Rows out of JSON: one a line, an array of them, or one object; and what stands where a row cannot
be read."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO, cast

CHUNK = 1 << 20
"""Characters read at once."""
SEPARATORS = re.compile(r"[\s,]*")
NOT_UTF8 = "expected UTF-8, found other bytes; save the file as UTF-8"


@dataclass(frozen=True)
class Unreadable:
    """Stands where a row should. `rest`: nothing behind it in the file can be read either."""

    reason: str
    rest: bool = False


PlacedRows = Iterator[tuple[str, Any]]
"""(line or row in the file, value)."""


def lone_surrogate(text: str) -> bool:
    """Whether a text holds half an emoji, or bytes that were no UTF-8: no tokenizer takes it."""
    if text.isascii():
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def parsed(line: str) -> Any:
    """One line of JSON, or why it is none."""
    if lone_surrogate(line):
        return Unreadable(NOT_UTF8)
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return Unreadable(f"cannot be read as json: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return Unreadable(f"cannot be read as json: {error}")


def json_lines(lines: Iterator[str] | TextIO) -> PlacedRows:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield f"line {number}", parsed(line)


def json_document(stream: TextIO) -> PlacedRows:
    """An array of rows, one row a line, or one object (its list `data`, where it has one)."""
    head = stream.read(CHUNK)
    if head.lstrip().startswith("["):
        yield from _array(stream, head)
        return
    head += stream.readline()
    if not head.strip():
        return
    first = parsed(next(line for line in head.split("\n") if line.strip()))
    if not isinstance(first, Unreadable) and _data_of(first) is None:
        yield from json_lines(itertools.chain(head.removesuffix("\n").split("\n"), stream))
        return
    text = head + stream.read()
    whole = parsed(text)
    data = _data_of(whole)
    if data is not None:
        for number, row in enumerate(data, 1):
            yield f"row {number}", row
    elif not isinstance(whole, Unreadable):
        yield "line 1", whole
    elif not isinstance(first, Unreadable):
        yield from json_lines(iter(text.split("\n")))
    else:
        yield "line 1", Unreadable(whole.reason, rest=True)


def _data_of(value: Any) -> list[Any] | None:
    data = value.get("data") if isinstance(value, dict) else None
    return data if isinstance(data, list) else None


def _array(stream: TextIO, head: str) -> PlacedRows:
    """Elements of a JSON array one by one, so that the array is never held whole."""
    decoder = json.JSONDecoder()
    buffer, at = head, head.index("[") + 1
    line = 1 + buffer.count("\n", 0, at)
    while True:
        after = cast(re.Match[str], SEPARATORS.match(buffer, at)).end()
        line += buffer.count("\n", at, after)
        at = after
        if buffer[at : at + 1] == "]":
            return
        try:
            value, end = decoder.raw_decode(buffer, at)
            complete = isinstance(value, dict | list | str) or end < len(buffer)
            reason = "the array does not end"
        except (ValueError, RecursionError) as error:
            complete = False
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        if complete:
            yield f"line {line}", value if _is_utf8(buffer[at:end]) else Unreadable(NOT_UTF8)
            line += buffer.count("\n", at, end)
            at = end
            continue
        # As much again as what waits, so that a long element is not parsed over and over.
        more = stream.read(max(CHUNK, len(buffer) - at))
        if not more:
            yield f"line {line}", Unreadable(f"cannot be read as json: {reason}", rest=True)
            return
        buffer, at = buffer[at:] + more, 0


def _is_utf8(text: str) -> bool:
    return not lone_surrogate(text)
