"""From rows to items: which are asked, which are left out and why, and whose text stands in as the
wrong document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvbridge.errors import EvalError
from kvbridge.eval.tasks import TASKS, kind_of
from kvbridge.eval.tasks.items import Item, RawItem
from kvbridge.geometry import digest_text
from kvbridge.model.model import Model

BEGINNING = 200
"""Characters by which two documents are told to share their text."""


@dataclass(frozen=True)
class Excluded:
    """A raw row that no item could be made of."""

    id: str
    document: str
    task: str
    reason: str


def make_items(
    raws: Iterable[RawItem],
    sender: Model,
    receiver: Model,
    *,
    limit: int | None = None,
    tasks: Sequence[str] | None = None,
    known: Callable[[str], str | None] = lambda document: None,
) -> tuple[list[Item], list[Excluded]]:
    """Items that fit both models, and what was left out and why; `limit` counts items per task,
    spread over documents.

    `known` says why nothing may be judged on a document (the translator was fitted or the gate
    calibrated on it), None where nothing speaks against it. Raises EvalError where two items of a
    task have one id.
    """
    made: list[tuple[int, int, Item]] = []
    excluded: list[Excluded] = []
    for number, raw in enumerate(spread(raws)):
        kind = kind_of(raw.body)
        if kind not in TASKS:
            raise EvalError(
                f"{raw.id}: expected task to be one of {', '.join(TASKS)}, found {kind!r}"
            )
        if tasks is not None and kind not in tasks:
            continue
        if (seen := known(raw.document)) is not None:
            excluded.append(Excluded(raw.id, raw.document, kind, seen))
            continue
        try:
            windows = TASKS[kind].items(raw, receiver)
            for item in windows:
                _check_range(item, sender, receiver)
        except EvalError as error:
            excluded.append(Excluded(raw.id, raw.document, kind, str(error)))
            continue
        made += [(turn, number, item) for turn, item in enumerate(windows)]
    keys = [(item.task, item.id) for _, _, item in made]
    _check_unique(keys + [(lost.task, lost.id) for lost in excluded])
    counts: dict[str, int] = {}
    items: list[Item] = []
    for _, _, item in sorted(made, key=lambda entry: entry[:2]):
        counts[item.task] = counts.get(item.task, 0) + 1
        if limit is None or counts[item.task] <= limit:
            items.append(item)
    return items, excluded


def _check_unique(keys: Sequence[tuple[str, str]]) -> None:
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        task, name = twice[0]
        raise EvalError(
            f"expected one item {name!r} of {task}, found two ({len(twice)} such ids): the second "
            "part of a text `a` is named `a+1`, and splits share their ids; give the rows other ids"
        )


def _check_range(item: Item, *models: Model) -> None:
    longest = item.prompt + max((*item.answers, *item.options), key=len)
    for model in models:
        count = len(model.encode(longest))
        if count > model.geometry.max_positions:
            raise EvalError(
                f"{item.id}: {count} tokens, {model.name} has {model.geometry.max_positions} "
                "positions"
            )


def spread(raws: Iterable[RawItem]) -> list[RawItem]:
    """Rows in an order that takes one of each document in turn, per task: a limit or a cut run sees
    many documents."""
    turns: dict[tuple[str, str], int] = {}
    keyed = []
    for number, raw in enumerate(raws):
        key = (kind_of(raw.body), raw.document)
        turns[key] = turns.get(key, 0) + 1
        keyed.append((turns[key], number, raw))
    return [raw for _, _, raw in sorted(keyed, key=lambda entry: entry[:2])]


def donors(items: Sequence[Item]) -> dict[str, str]:
    """For each item, text of other documents that is at least half as long again as its prompt.

    Documents that share its prompt's beginning are passed over, for they would not be wrong (less
    text, or none, where no others are).
    """
    whole: dict[str, str] = {}
    for item in items:
        text = item.prompt + item.answers[0]
        if len(text) > len(whole.get(item.document, "")):
            whole[item.document] = text
    documents = sorted(whole, key=digest_text)
    place = {document: number for number, document in enumerate(documents)}
    donated = {}
    for item in items:
        at, text = place[item.document], ""
        for step in range(1, len(documents)):
            other = whole[documents[(at + step) % len(documents)]]
            if item.prompt[:BEGINNING] in other or other[:BEGINNING] in item.prompt:
                continue
            text += other + "\n"
            if len(text) >= 1.5 * len(item.prompt):
                break
        donated[item.id] = text
    return donated
