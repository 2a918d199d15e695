"""From the bytes of a JSON file to a typed object, or to one line that says what is wrong. No
torch.

A file is described by a dataclass: its fields are the file's, its annotations (`Annotated` with
`msgspec.Meta`, `Literal`, nested dataclasses) say what may stand in each, and a `__post_init__`
that raises ValueError states what no type can. `parse_json` bounds what is built and refuses what
JSON readers disagree on; `convert` then checks strictly: nothing is coerced but a whole number to a
float, and no field is missing or unknown. A field that may be missing is `T | UnsetType = UNSET`.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import UNSET, Meta

from kvbridge.errors import CorruptFile, UnknownSchema, UsageError
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


def one_of(*names: str) -> Meta:
    """For `Annotated[str, one_of(...)]`: one of these names."""
    pattern = rf"\A({'|'.join(map(re.escape, names))})\Z"
    return Meta(pattern=pattern, description=f"be one of {', '.join(names)}")


def decode(raw: bytes, kind: type[T], name: str) -> T:
    """The object that the JSON bytes of the file `name` stand for; raises CorruptFile."""
    return convert(parse_json(raw, name), kind, name)


def convert(body: object, kind: type[T], name: str, *, partial: bool = False) -> T:
    """`body`, as `parse_json` gives it, as an object of `kind`; raises CorruptFile.

    The message names the file, the path within it, what was expected and, cut, what was found.
    `partial`: fields that `kind` does not have are passed over, and such as have a default may
    miss.
    """
    try:
        value = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise CorruptFile(f"{name}: {_told(str(error), body)}") from error
    if not partial:
        _check_fields(body, value, name, "")
    return value


def check_fields(value: Any) -> None:
    """Raises UsageError where a field of a dataclass that a caller made is not of its type."""
    kind: Any = type(value)
    for name, hint in _hints(kind).items():
        given = getattr(value, name)
        body = list(given) if isinstance(given, tuple) else given
        try:
            msgspec.convert(body, hint)
        except UnicodeEncodeError as error:
            raise UsageError(f"{name}=: found half a character in {given!a}") from error
        except msgspec.ValidationError as error:
            said = str(error).split(" - at")[0].replace("`", "")
            shown = " ".join(_SHORT.repr(given).split())
            raise UsageError(f"{name}=: {said[:1].lower()}{said[1:]}, found {shown}") from error


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def to_json(value: Any) -> Any:
    """Plain JSON types of an object that `convert` can give; fields that are UNSET are left out."""
    if is_dataclass(value):
        members = {field.name: getattr(value, field.name) for field in fields(value)}
        return {name: to_json(member) for name, member in members.items() if member is not UNSET}
    if isinstance(value, Mapping):
        return {name: to_json(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(member) for member in value]
    if isinstance(value, frozenset):
        return sorted(value)
    return value


def check_schema(body: object, schema: str | int, name: str, advice: str = "") -> dict[str, Any]:
    """`body` itself, an object of that schema. Raises CorruptFile where it names none,
    UnknownSchema where it names another."""
    advice = advice or "use the matching kvbridge"
    if not isinstance(body, dict) or "schema" not in body:
        raise CorruptFile(f"{name}: expected schema {schema}, found none; {advice}")
    if type(body["schema"]) is not type(schema) or body["schema"] != schema:
        named = _SHORT.repr(body["schema"])
        raise UnknownSchema(f"{name}: expected schema {schema}, found {named}; {advice}")
    return body


def _check_fields(body: Any, value: object, name: str, path: str) -> None:
    """Raises CorruptFile where an object in `body` has other fields than the dataclass that it
    became: msgspec passes over unknown ones and fills in defaults."""
    if is_dataclass(value):
        members = {field.name: getattr(value, field.name) for field in fields(value)}
        wanted = {member for member, held in members.items() if held is not UNSET}
        if body.keys() != wanted:
            odd = ", ".join(sorted(ascii(field)[:40] for field in body.keys() ^ wanted)[:6])
            at = f" at {path.removeprefix('.')}" if path else ""
            raise CorruptFile(f"{name}: unexpected or missing fields{at}: {odd}")
        for member in wanted:
            _check_fields(body[member], members[member], name, f"{path}.{member}")
    elif isinstance(value, tuple):
        for index, member in enumerate(value):
            _check_fields(body[index], member, name, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, member in value.items():
            _check_fields(body[key], member, name, f"{path}[{ascii(key)[:40]}]")


def _told(message: str, body: object) -> str:
    """What msgspec says of `body`, with the value found at the path it names."""
    what, _, where = message.partition(" - at `")
    is_key = where.startswith("key` in `")
    path = where.removeprefix("key` in `").removeprefix("$").removesuffix("`")
    at = f" at {path.removeprefix('.')}" if path else ""
    if is_key:
        return f"{what[:1].lower()}{what[1:]} as every key{at}".replace("`", "")
    value, is_whole = _value_at(body, path)
    wanted, _, kind = what.partition(", got ")
    told = f"{wanted[:1].lower()}{wanted[1:]}{at}"
    if is_whole and what.startswith("Expected"):
        told += f", found {_SHORT.repr(value)}"
    elif kind:
        told += f", found {kind}"
    return "".join(c if c.isprintable() else "?" for c in told.replace("`", ""))[:300]


def _value_at(body: Any, path: str) -> tuple[Any, bool]:
    """The value at a path as msgspec writes it, and whether the path leads there: it does not
    through the values of a mapping, which msgspec leaves unnamed."""
    position = 0
    for step in _STEP.finditer(path):
        if step.start() != position:
            return None, False
        field, index = step.groups()
        body = body[field] if field else body[int(index)]
        position = step.end()
    return body, position == len(path)


def parse_json(raw: bytes, name: str) -> object:
    """JSON without duplicate keys, NaN, infinities, lone surrogates or bad UTF-8; raises
    CorruptFile naming `name`.

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
    """`body` as files hold it: sorted, one value a line, without NaN; the same body, the same
    bytes."""
    text = json.dumps(body, sort_keys=True, indent=1, ensure_ascii=ascii_only, allow_nan=False)
    return f"{text}\n".encode()
