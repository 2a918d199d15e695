"""Names of conditions: a route to the receiver's cache × how many of the last tokens the receiver recomputes.

A route at tail 1 bears its own name, at another tail `<route>_tail<n>` (`tail_only<n>` for tail_only). Two conditions are
compared like with like when both stand at the same tail; where requests ended on several tails (a gate's repair ladder),
each with the same request's row at its own tail.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kvbridge.errors import EvalError, unknown_names

TAILS = (1, 32)
OWN_TAIL = "_own_tail"
ROUTES = ("translated", "wrong_document", "token_only", "tail_only", "raw_sender")
CONTROLS = ("token_only", "wrong_document", "tail_only")
"""Routes that a translation must beat at its own tail."""

_FIRST = ("native", "sender", "translated", "gated", "no_context", *ROUTES[1:])
_NAME = re.compile(rf"({'|'.join(ROUTES)})(?:(?:_tail|(?<=tail_only))([1-9]\d*))?")


def named(route: str, tail: int) -> str:
    """The condition of `route` with `tail` recomputed tokens."""
    return (
        route if tail == 1 else f"{route}{tail}" if route == "tail_only" else f"{route}_tail{tail}"
    )


def parsed(name: str) -> tuple[str, int] | None:
    """Route and tail of a condition's name; None for conditions that are no route, and for other spellings."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    route, tail = found[1], int(found[2] or 1)
    return (route, tail) if named(route, tail) == name else None


DEFAULT = (
    "native",
    "sender",
    "no_context",
    *(named(route, tail) for route in ("translated", *CONTROLS) for tail in TAILS),
)
"""What a run takes without a choice, whatever the pair."""


def is_subject(name: str) -> bool:
    """Whether a condition is judged: a translation at any tail, or gated."""
    route = parsed(name)
    return name == "gated" or (route is not None and route[0] == "translated")


def paired(route: str, tails: Sequence[int]) -> str:
    """`route` beside requests that ended on `tails`: the condition at that tail; with several tails a name for each
    request's row at its own tail, which no run computes but `Table.of` puts together."""
    return named(route, tails[0]) if len(tails) == 1 else route + OWN_TAIL


def against(name: str, *tails: int) -> tuple[str, ...]:
    """What the condition `name`, whose rows stand at `tails`, is compared with, like with like: controls of the same tail,
    the sender's raw cache, for `gated` the same translation without the gate, at tail 1 also no context."""
    same = tuple(paired(route, tails) for route in CONTROLS)
    gate = (paired("translated", tails),) if name == "gated" else ()
    return (*gate, *same, *(("no_context",) if tails == (1,) else ()), paired("raw_sender", tails))


def with_references(names: Iterable[str], *tails: int) -> tuple[str, ...]:
    """`names`, and where `gated` is among them what its risk over coverage is counted from: native, and the same
    translation ungated at every one of `tails`, on which requests may end."""
    names = tuple(names)
    ungated = (named("translated", tail) for tail in tails)
    return tuple(dict.fromkeys((*names, *(("native", *ungated) if "gated" in names else ()))))


def ordered(names: Iterable[str]) -> list[str]:
    """Conditions as they are run and shown; unknown ones last."""

    def place(name: str) -> tuple[int, int, str]:
        route, tail = parsed(name) or (name, 0)
        return (_FIRST.index(route) if route in _FIRST else len(_FIRST), tail, name)

    return sorted(set(names), key=place)


def check_names(names: Iterable[str], known: Iterable[str]) -> None:
    """Raises EvalError for names that are neither `known` nor a route at some tail."""
    known = list(known)
    if unknown := [n for n in names if n not in known and parsed(n) is None]:
        raise EvalError(
            unknown_names("conditions", unknown, known, " (or another tail, as translated_tail17)")
        )
