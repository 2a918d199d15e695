"""Rows of one task as aligned arrays, and the numbers that leave the package.

Comparisons are paired: two conditions are compared on the items both answered, so a row that failed
in one of them is counted as missing and never turns into a difference of two unlike sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from kvbridge.errors import EvalError
from kvbridge.eval.conditions.names import named, paired, parsed, routes
from kvbridge.eval.run.rows import Row
from kvbridge.eval.statistics.bootstrap import FloatArray, Interval, NotShown, ratio_interval
from kvbridge.eval.statistics.ratios import recovery


@dataclass(frozen=True)
class Table:
    """The usable rows of one task by condition and item; `Table.of` sorts, so their order changes
    nothing.

    Where gated requests ended on several tails, `<route>_own_tail` holds for each of them the row
    of the route at its tail.
    """

    task: str
    cells: dict[str, dict[str, Row]]

    @classmethod
    def of(cls, task: str, rows: Iterable[Row]) -> Table:
        """Rows of `task` that are sound."""
        usable = [row for row in rows if row.task == task and row.status == "ok"]
        cells: dict[str, dict[str, Row]] = {}
        for row in sorted(usable, key=lambda row: row.key):
            cells.setdefault(row.condition, {})[row.item] = row
        table = cls(task, cells)
        tails = table.tails("gated")
        if len(tails) > 1:
            for route in routes():
                if own := _at_own_tails(cells, route):
                    cells[paired(route, tails)] = own
        return table

    def items(self, conditions: Sequence[str], field: str) -> list[str]:
        """Items, sorted, for which every one of `conditions` has a value of `field`."""
        cells = [self.cells.get(name, {}) for name in conditions]
        shared = set.intersection(*(set(cell) for cell in cells)) if cells else set()
        return [
            item
            for item in sorted(shared)
            if all(getattr(cell[item], field) is not None for cell in cells)
        ]

    def column(self, condition: str, field: str, items: Sequence[str]) -> FloatArray:
        """`field` of `condition` at `items`: `[items]`."""
        return np.array(
            [getattr(self.cells[condition][item], field) for item in items], dtype=np.float64
        )

    def tails(self, condition: str) -> tuple[int, ...]:
        """How many of the last tokens the rows of `condition` had recomputed, ascending: one number
        but behind a ladder. As the rows say, else as the name does (rows of older runs)."""
        known = {r.tail for r in self.cells.get(condition, {}).values() if r.tail is not None}
        return tuple(sorted(known)) or ((parsed(condition) or ("", 1))[1],)

    def documents(self, condition: str, items: Sequence[str]) -> list[str]:
        return [self.cells[condition][item].document for item in items]

    def nats(self, condition: str, reference: str, items: Sequence[str]) -> FloatArray:
        """Loss of `condition` `[items]` in nats over the characters that `reference` scored.

        The two are the same characters up to a token boundary at the ends: the rate per character
        is what carries over.
        """
        rate = self.column(condition, "loss", items) / self.column(condition, "characters", items)
        return rate * self.column(reference, "characters", items)

    def weighted(self, condition: str, field: str, weight: str) -> Interval | None:
        """Σ field·weight / Σ weight, or None without rows: a mean over positions, not over
        items."""
        if not (items := self.items([condition], field)):
            return None
        weights = self.column(condition, weight, items)
        values = self.column(condition, field, items) * weights
        return ratio_interval(values, weights, self.documents(condition, items))

    def per(self, condition: str, unit: str) -> Interval | None:
        """Nats per `unit` (`characters` or `tokens`), Σ loss / Σ unit."""
        if not (items := self.items([condition], "loss")):
            return None
        numerator, denominator = (self.column(condition, name, items) for name in ("loss", unit))
        return (
            ratio_interval(numerator, denominator, self.documents(condition, items))
            if denominator.sum()
            else None
        )

    def recovery(self, condition: str) -> Interval | NotShown | None:
        """Recovery of `condition`, on the items that it, native and no_context share."""
        if not (items := self.items([condition, "native", "no_context"], "loss")):
            return None
        loss, native, floor = (
            self.nats(name, "native", items) for name in (condition, "native", "no_context")
        )
        return recovery(loss, native, floor, self.documents("native", items))


def _at_own_tails(cells: dict[str, dict[str, Row]], route: str) -> dict[str, Row]:
    """For each gated item the row of `route` at the tail that the gated request ended on."""
    own = {}
    for item, gated in cells["gated"].items():
        row = cells.get(named(route, gated.tail or 1), {}).get(item)
        if row is not None:
            own[item] = row
    return own


def median(values: FloatArray) -> Interval:
    """Median of `[n]` with the distribution-free interval between order statistics; none below six
    values."""
    ordered, n = np.sort(values), len(values)
    below = int(stats.binom.ppf(0.025, n, 0.5)) - 1
    if below < 0:
        return Interval(float(np.median(ordered)), float("nan"), float("nan"))
    return Interval(float(np.median(ordered)), float(ordered[below]), float(ordered[n - 1 - below]))


def number(value: float | None, digits: int = 6) -> float | None:
    """A float as stored: six significant digits, so that a sum's last bits never show; NaN is
    null."""
    return None if value is None or not np.isfinite(value) else float(f"{value:.{digits}g}")


def bounds(interval: Interval | NotShown | None) -> list[float | None] | None:
    if not isinstance(interval, Interval) or not interval.known:
        return None
    return [number(interval.low), number(interval.high)]


def figure(result: Interval | NotShown | None) -> dict[str, Any]:
    """`{"value", "ci"}`, with `refused` saying why where there is no value."""
    if isinstance(result, NotShown):
        return {"value": None, "ci": None, "refused": result.because}
    return {"value": number(result.estimate) if result else None, "ci": bounds(result)}


def check_rows(rows: Sequence[Row]) -> None:
    """Raise EvalError unless `rows` is a non-empty table of one pair without duplicates."""
    if not rows:
        raise EvalError(
            "no rows: expected at least one item; check that the data has texts and run again"
        )
    if len(pairs := {row.pair for row in rows}) > 1:
        raise EvalError(
            f"rows of {len(pairs)} pairs together ({', '.join(sorted(pairs)[:3])}); summarise each "
            "pair alone"
        )
    keys: set[tuple[str, str, str]] = set()
    documents: dict[tuple[str, str], str] = {}
    for row in rows:
        if row.key in keys:
            raise EvalError(f"(item, task, condition) {row.key} appears twice")
        keys.add(row.key)
        known = documents.setdefault((row.task, row.item), row.document)
        if known != row.document:
            raise EvalError(
                f"item {row.item} belongs to document {known} in one row and to {row.document} in "
                "another"
            )
