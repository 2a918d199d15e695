"""Names of conditions, and what is compared with what.

A route to the receiver's cache bears its own name at tail 1, at another tail `<route>_tail<n>`
(`tail_only<n>` for tail_only). Two conditions are compared like with like when both stand at the
same tail; where requests ended on several tails (a gate's repair ladder), each with the same
request's row at its own tail. All of it follows from the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvbridge.errors import EvalError, unknown_names
from kvbridge.eval.conditions import CONDITIONS
from kvbridge.eval.conditions.base import LAST, TAILS, Role
from kvbridge.eval.conditions.prompt import Prompt
from kvbridge.eval.conditions.setup import Setup
from kvbridge.eval.tasks.start import Start

OWN_TAIL = "_own_tail"


def routes() -> tuple[str, ...]:
    """Conditions that exist at every tail."""
    return tuple(name for name, one in CONDITIONS.items() if one.by_tail)


def controls() -> tuple[str, ...]:
    """Routes that a translation must beat at its own tail."""
    return tuple(name for name, one in CONDITIONS.items() if one.role == "control")


def known_names() -> tuple[str, ...]:
    """Every name to offer: conditions, and routes at the tails that runs take."""
    tailed = {route: TAILS for route in routes()}
    return tuple(
        CONDITIONS[name].named(tail) for name in CONDITIONS for tail in tailed.get(name, (1,))
    )


def named(route: str, tail: int) -> str:
    """The condition of `route` with `tail` recomputed tokens."""
    return CONDITIONS[route].named(tail)


def parsed(name: str) -> tuple[str, int] | None:
    """Route and tail of a condition's name; None for conditions that are no route, and for other
    spellings."""
    for route, one in CONDITIONS.items():
        tail = one.tail_of(name)
        if tail is not None:
            return route, tail
    return None


def condition(name: str) -> Callable[[Prompt], Start]:
    """What runs the condition of that name, a route at any tail among them; raises EvalError."""
    check_names([name])
    route, tail = parsed(name) or (name, 1)
    return lambda prompt: CONDITIONS[route].run(prompt, tail)


def role(name: str) -> Role:
    """The part of a condition in the comparison; what is not registered here is a reference."""
    route, _ = parsed(name) or (name, 1)
    return CONDITIONS[route].role if route in CONDITIONS else "reference"


def label(name: str) -> str:
    """A condition in words."""
    if name.endswith(OWN_TAIL):
        return f"{label(name.removesuffix(OWN_TAIL))}, each at its own tail"
    route, tail = parsed(name) or (name, 1)
    if route not in CONDITIONS:
        return route.replace("_", " ")
    return CONDITIONS[route].labelled(tail)


def phrase(route: str) -> str:
    """A condition as something to be beaten."""
    return CONDITIONS[route].phrase or CONDITIONS[route].label.lower()


def is_subject(name: str) -> bool:
    """Whether a condition is judged: a translation at any tail, or gated."""
    return role(name) == "subject"


def paired(route: str, tails: Sequence[int]) -> str:
    """`route` beside requests that ended on `tails`: the condition at that tail; with several tails
    a name for each request's row at its own tail, which no run computes but `Table.of` puts
    together."""
    return named(route, tails[0]) if len(tails) == 1 else route + OWN_TAIL


def needed(name: str, *tails: int) -> tuple[str, ...]:
    """Comparisons without which the figures of a subject, whose rows stand at `tails`, say
    little."""
    route, _ = parsed(name) or (name, 1)
    beside = CONDITIONS[route].beside if route in CONDITIONS else ()
    return tuple(paired(other, tails) for other in (*beside, *controls()))


def against(name: str, *tails: int) -> tuple[str, ...]:
    """What the condition `name`, whose rows stand at `tails`, is compared with, like with like:
    what it stands beside, controls of the same tail, at tail 1 the floor, and references."""
    others = list(needed(name, *tails))
    for other, one in CONDITIONS.items():
        if one.role == "floor" and tails == (1,):
            others.append(other)
        elif one.role == "reference" and one.by_tail:
            others.append(paired(other, tails))
    return tuple(others)


def defaults(setup: Setup | None = None) -> tuple[str, ...]:
    """The conditions that a run without a choice takes: all that every pair allows, and with
    `setup` those that it allows, too, with everything that its gate's requests are compared
    with."""
    names = []
    for one in CONDITIONS.values():
        if one.available is not None and (setup is None or not one.available(setup)):
            continue
        names += [one.named(tail) for tail in one.tails]
        if setup is not None and one.beside:
            for tail in setup.tails:
                names += [other for other in against(one.name, tail) if role(other) != "reference"]
    return tuple(dict.fromkeys(names))


def with_references(names: Iterable[str], *tails: int) -> tuple[str, ...]:
    """`names`, and where `gated` is among them what its risk over coverage is counted from: native,
    and the same translation ungated at every one of `tails`, on which requests may end."""
    names = tuple(names)
    more: list[str] = []
    for name in names:
        beside = CONDITIONS[name].beside if name in CONDITIONS else ()
        if beside:
            more += ["native", *(named(route, tail) for route in beside for tail in tails)]
    return tuple(dict.fromkeys((*names, *more)))


def ordered(names: Iterable[str]) -> list[str]:
    """Conditions as they are run and shown; unknown ones last."""

    def place(name: str) -> tuple[int, int, str]:
        route, tail = parsed(name) or (name, 0)
        return (CONDITIONS[route].order if route in CONDITIONS else LAST, tail, name)

    return sorted(set(names), key=place)


def check_names(names: Iterable[str]) -> None:
    """Raises EvalError for names that are neither a condition nor a route at some tail."""
    unknown = [name for name in names if name not in CONDITIONS and parsed(name) is None]
    if unknown:
        raise EvalError(
            unknown_names(
                "conditions", unknown, known_names(), " (or another tail, as translated_tail17)"
            )
        )
