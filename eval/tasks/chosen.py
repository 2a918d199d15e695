"""From rows to items: which are asked, which are left out and why, and whose text stands in as the
wrong document."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvbridge.duplicates import clustered
from kvbridge.errors import EvalError
from kvbridge.eval.tasks import TASKS, Task, kind_of
from kvbridge.eval.tasks.base import CutsText
from kvbridge.eval.tasks.items import Item, RawItem
from kvbridge.geometry import digest_text
from kvbridge.model.beginning import encode_beginning
from kvbridge.model.model import Model

MOST_REASONS = 3
DIFFERS = re.compile(r"\d[\d.,]*|'[^']*'|\"[^\"]*\"")
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
    spread over documents. Documents whose items repeat one another, wholly or nearly, are one
    document of the items: resampled together, and never each other's wrong document.

    `known` says why nothing may be judged on a document (the translator was fitted or the gate
    calibrated on it), None where nothing speaks against it. A row of no kind is left out like any
    other; raises EvalError where all are, and where two items of a task have one id.
    """
    made: list[tuple[int, int, Item]] = []
    known_rows, excluded = _of_known_kinds(raws, next(iter(tasks or TASKS)))
    for number, raw in enumerate(spread(known_rows)):
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
            windows = _windows(TASKS[kind], raw, sender, receiver)
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
    return _together(items), excluded


def _together(items: Sequence[Item]) -> list[Item]:
    """Items whose document is that of their cluster of near duplicates."""
    cluster = clustered((item.document, item.prompt + item.answers[0]) for item in items)
    return [replace(item, document=cluster[item.document]) for item in items]


def _of_known_kinds(raws: Iterable[RawItem], task: str) -> tuple[list[RawItem], list[Excluded]]:
    """Rows that some task takes, and the others with the reason, counted with `task`; EvalError
    where none does."""
    usable: list[RawItem] = []
    unknown: list[Excluded] = []
    for raw in raws:
        try:
            kind_of(raw.body)
        except EvalError as error:
            unknown.append(Excluded(raw.id, raw.document, task, str(error)))
            continue
        usable.append(raw)
    if unknown and not usable:
        raise EvalError(unknown[0].reason)
    return usable, unknown


def _windows(task: Task, raw: RawItem, sender: Model, receiver: Model) -> list[Item]:
    if isinstance(task, CutsText):
        return task.cut_items(raw, sender, receiver)
    return task.items(raw, receiver)


def commonest_reasons(excluded: Sequence[Excluded]) -> str:
    """Why rows were left out, the commonest first with how many rows it kept out, and one of them
    as an example; empty where none were."""
    examples: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for lost in excluded:
        reason = lost.reason.removeprefix(f"{lost.id}: ")
        # What differs between rows is no reason of its own: numbers, and what is quoted.
        kind = DIFFERS.sub("…", reason)
        examples.setdefault(kind, f"{reason} ({lost.id})")
        counts[kind] += 1
    parts = [f"{count}: {examples[kind]}" for kind, count in counts.most_common(MOST_REASONS)]
    others = len(excluded) - sum(count for _, count in counts.most_common(MOST_REASONS))
    return "; ".join(parts + ([f"{others} for other reasons"] if others else []))


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
        positions = model.geometry.max_positions
        if len(encode_beginning(model, longest, positions + 1)) > positions:
            raise EvalError(
                f"{item.id}: more tokens than the {positions} positions of {model.name}"
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
