"""Typed decoding: what is taken is exactly what was described, and a refusal says where, in a line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
from msgspec import UNSET, Meta, UnsetType

from kvbridge.codec import Count, Share, check_schema, convert, decode, one_of, to_json
from kvbridge.errors import CorruptFile, UnknownSchema


@dataclass(frozen=True)
class Inner:
    name: Annotated[str, one_of("a.b", "c")]
    sizes: tuple[Count, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) > 3:
            raise ValueError(f"expected at most three sizes\n\x1b, found {self.sizes}")


@dataclass(frozen=True)
class Outer:
    parts: tuple[Inner, ...]
    share: Share
    limits: dict[Annotated[str, Meta(pattern=r"\A[a-z]+\Z")], Share]
    note: str | None = None
    extra: str | UnsetType = UNSET
    names: frozenset[str] = field(default_factory=frozenset)


SOUND: dict[str, Any] = {
    "parts": [{"name": "c", "sizes": [1, 2]}, {"name": "a.b", "sizes": []}],
    "share": 1,
    "limits": {"x": 0.5},
    "note": None,
    "names": ["p", "q"],
}


def changed(*path: Any, value: Any) -> Any:
    body = json.loads(json.dumps(SOUND))
    at = body
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return body


def test_what_is_read_is_what_is_written():
    outer = decode(json.dumps(SOUND).encode(), Outer, "file")
    assert outer.parts[0] == Inner("c", (1, 2))
    assert outer.extra is UNSET
    assert to_json(outer) == SOUND
    assert convert({**SOUND, "extra": "y"}, Outer, "file").extra == "y"


REFUSED = {
    "a bool for a whole number": (changed("parts", 0, "sizes", 1, value=True), "parts[0].sizes[1]"),
    "a float for a whole number": (changed("parts", 0, "sizes", 1, value=2.0), "found 2.0"),
    "a huge number": (changed("parts", 1, "sizes", value=[10**30]), "parts[1].sizes[0]"),
    "text for a number": (changed("share", value="1"), "share, found '1'"),
    "out of range": (changed("share", value=1.5), "<= 1.0 at share, found 1.5"),
    "another name": (changed("parts", 1, "name", value="axb"), "parts[1].name, found 'axb'"),
    "a value of a mapping": (changed("limits", value={"x": 2}), "limits"),
    "a key of a mapping": (changed("limits", value={"X | y\n": 1}), "every key at limits"),
    "what no type says": (changed("parts", 0, "sizes", value=[1] * 4), "at most three sizes"),
    "an unknown field": (changed("more", value=1), "unexpected or missing fields: 'more'"),
    "an unknown field inside": (changed("parts", 1, "more", value=1), "at parts[1]: 'more'"),
    "a hostile field": (changed("parts", 1, "é\n\x1b[2J", value=1), r"\xe9\n\x1b[2J"),
    "a field with a default left out": (
        {name: value for name, value in SOUND.items() if name != "note"},
        "'note'",
    ),
    "a field left out": (changed("parts", 0, value={"name": "c"}), "sizes"),
    "null where it may be missing": (changed("extra", value=None), "extra, found None"),
    "a long text": (changed("share", value="x" * 10_000), "share"),
    "a deep value": (changed("share", value=[[[[1] * 1000] * 100] * 10]), "share"),
    "no object": ([1], "expected object, found [1]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refusal_says_where_and_what_in_a_line(what):
    body, words = REFUSED[what]
    with pytest.raises(CorruptFile) as refusal:
        convert(body, Outer, "file.json")
    message = str(refusal.value)
    assert message.startswith("file.json: ")
    assert words in message
    assert message.isprintable()
    assert len(message) < 400


def test_of_a_partial_description_other_fields_are_passed_over():
    body = {**changed("more", value=1), "parts": []}
    del body["note"]
    assert convert(body, Outer, "file", partial=True).share == 1.0
    with pytest.raises(CorruptFile, match="share"):
        convert({**body, "share": -1}, Outer, "file", partial=True)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', "NaN", "1e999", "[" * 100, "9" * 5000])
def test_json_that_readers_disagree_on_is_refused(text):
    with pytest.raises(CorruptFile, match="file: not valid JSON"):
        decode(text.encode(), dict[str, int], "file")


def test_a_schema_is_another_or_none():
    assert check_schema({"schema": 1}, 1, "file") == {"schema": 1}
    for body in ([], None, {}, "schema"):
        with pytest.raises(CorruptFile, match="expected schema x/1, found none"):
            check_schema(body, "x/1", "file")
    for other in (True, 1.0, 2, None, "1", ["x" * 10_000]):
        with pytest.raises(UnknownSchema, match="expected schema 1, found") as refusal:
            check_schema({"schema": other}, 1, "file")
        assert len(str(refusal.value)) < 200
