"""From the bytes of a JSON file to a typed, frozen object, or to one line that says what is wrong.

`parse_json` bounds what is built and refuses what JSON readers disagree on; `convert` then checks
types strictly: nothing is coerced, no field is missing or unknown. No torch.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvbridge.errors import CorruptFile, UnknownSchema
from kvbridge.files import regular
from kvbridge.format import MAX_JSON_BYTES, MAX_JSON_DEPTH, MAX_JSON_VALUES

_INT64_MAX = (1 << 63) - 1
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
T = TypeVar("T")

Index = Annotated[int, Meta(ge=0, le=_INT64_MAX)]
Count = Annotated[int, Meta(ge=1, le=_INT64_MAX)]
Share = Annotated[float, Meta(ge=0, le=1)]
Finite = Annotated[float, Meta(gt=-1e30, lt=1e30)]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
ShortName = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what a file holds: frozen, and read strictly. A `__post_init__` that raises ValueError
    states what no type can; its message reaches the reader with the path to the object."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `convert` is the inverse."""
        return msgspec.to_builtins(self)


def one_of(*names: str) -> Meta:
    """For `Annotated[str, one_of(...)]`: one of these names."""
    return Meta(pattern=rf"\A({'|'.join(map(re.escape, names))})\Z")


def decode(raw: bytes, kind: type[T], name: str) -> T:
    """The object that the JSON bytes of the file `name` stand for; raises CorruptFile."""
    return convert(parse_json(raw, name), kind, name)


def convert(body: object, kind: type[T], name: str) -> T:
    """`body`, as `parse_json` gives it, as an object of `kind`; raises CorruptFile.

    The message names the file, the path within it, what was expected and, cut, what was found.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise CorruptFile(f"{name}: {_told(str(error), body)}") from error


def check_schema(body: object, schema: str | int, name: str, advice: str = "") -> dict[str, Any]:
    """`body` itself, an object of that schema. Raises CorruptFile where it names none, UnknownSchema
    where it names another."""
    if not isinstance(body, dict) or "schema" not in body:
        raise CorruptFile(f"{name}: expected schema {schema}, found none{advice and f'; {advice}'}")
    if type(body["schema"]) is not type(schema) or body["schema"] != schema:
        raise UnknownSchema(
            f"{name}: expected schema {schema}, found {_SHORT.repr(body['schema'])}"
            f"; {advice or 'use the matching kvbridge'}"
        )
    return body


def _told(message: str, body: object) -> str:
    """What msgspec says of `body`, with the value found at the path it names."""
    what, _, where = message.partition(" - at `$")
    path = where.removesuffix("`")
    at = f" at {path.removeprefix('.')}" if path else ""
    value, whole = _value_at(body, path)
    wanted, got, kind = what.partition(", got ")
    if what.startswith("Expected") and whole:
        told = f"{wanted[0].lower()}{wanted[1:]}{at}, found {_SHORT.repr(value)}"
    elif got:
        told = f"{wanted[0].lower()}{wanted[1:]}{at}, found {kind}"
    else:
        told = f"{what[0].lower()}{what[1:]}{at}"
    return "".join(c if c.isprintable() else "?" for c in told.replace("`", ""))[:300]


def _value_at(body: object, path: str) -> tuple[Any, bool]:
    """The value at a path as msgspec writes it, and whether the path leads there: it does not through
    the values of a mapping, which msgspec leaves unnamed."""
    position = 0
    for step in _STEP.finditer(path):
        if step.start() != position:
            return None, False
        field, index = step.groups()
        try:
            body = body[field] if field else body[int(index)]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return None, False
        position = step.end()
    return body, position == len(path)


def parse_json(raw: bytes, name: str) -> object:
    """JSON without duplicate keys, NaN, infinities, lone surrogates or bad UTF-8; raises CorruptFile
    naming `name`.

    The number of values is bounded by MAX_JSON_VALUES before anything is built: a few bytes of text
    would otherwise become a hundred bytes of objects each.
    """
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_JSON_VALUES:
        raise CorruptFile(f"{name}: more than {MAX_JSON_VALUES} JSON values")
    try:
        text = raw.decode("utf-8")
        body = json.loads(
            text, object_pairs_hook=_once, parse_constant=_refuse, parse_float=_finite
        )
        if _SURROGATE.search(text):
            json.dumps(body, ensure_ascii=False).encode()
        if _is_deeper(body, MAX_JSON_DEPTH):
            raise ValueError(f"nested more than {MAX_JSON_DEPTH} deep")
        return body
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{name}: not valid JSON: {str(error)[:200]}") from error


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key stands twice")
    return members


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not allowed")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is out of range")
    return value


def _is_deeper(body: object, limit: int) -> bool:
    """Whether lists and objects stand more than `limit` deep in each other."""
    level = [body]
    for _ in range(limit + 1):
        below: list[object] = []
        for value in level:
            if isinstance(value, dict):
                below += (*value.values(), None)
            elif isinstance(value, list):
                below += (*value, None)
        if not below:
            return False
        level = below
    return True


def read_json(path: Path) -> object:
    """A JSON file of bounded size; raises CorruptFile."""
    regular(path)
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CorruptFile(
                f"{path}: {size} bytes of JSON, more than the {MAX_JSON_BYTES} allowed"
            )
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CorruptFile(f"{path}: cannot be read: {error.strerror}") from error


def json_bytes(body: Mapping[str, Any], *, ascii_only: bool = True) -> bytes:
    """`body` as files hold it: sorted, one value a line, without NaN; the same body, the same bytes."""
    text = json.dumps(body, sort_keys=True, indent=1, ensure_ascii=ascii_only, allow_nan=False)
    return f"{text}\n".encode()
