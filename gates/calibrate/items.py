"""Calibration requests as numbers: what the signals said on each rung, and whether it was damaged.
Arrays, no models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvbridge.gates.decide.sealed import Rung
from kvbridge.gates.signals import SIGNALS, columns_of

Doubles = NDArray[np.float64]
MARGIN = 0.25


@dataclass(frozen=True)
class Attempt:
    """One rung of one request. `columns` None: refused before the gate. `flops`: handoff and gate
    together; `gate_flops`: what of it each part of the gate took (by its name), where that is
    known."""

    columns: Mapping[str, float] | None
    damaged: bool
    flops: int = 0
    gate_flops: Mapping[str, int] = field(default_factory=dict)

    def paying(self, parts: Collection[str]) -> Attempt:
        """This attempt as it costs where the gate does nothing but `parts`."""
        kept = {part: flops for part, flops in self.gate_flops.items() if part in parts}
        return replace(
            self,
            flops=self.flops - sum(self.gate_flops.values()) + sum(kept.values()),
            gate_flops=kept,
        )


@dataclass(frozen=True)
class GatedItem:
    """One request with an attempt per rung, cheapest first. `prefill`: FLOPs of the receiver's
    own."""

    id: str
    document: str
    tokens: int
    attempts: tuple[Attempt, ...]
    prefill: int = 0


def matrix(
    items: Sequence[GatedItem], rung: int, columns: Sequence[str]
) -> tuple[Doubles, NDArray[np.bool_], list[int]]:
    """Rows `[n, columns]`, damage `[n]` and item numbers, of the requests that reached the gate on
    this rung."""
    rows, damaged, at = [], [], []
    for number, item in enumerate(items):
        attempt = item.attempts[rung]
        if attempt.columns is not None:
            rows.append([attempt.columns[c] for c in columns])
            damaged.append(attempt.damaged)
            at.append(number)
    values = np.array(rows, dtype=np.float64).reshape(len(at), len(columns))
    return values, np.array(damaged, dtype=bool), at


def limits_of(items: Sequence[GatedItem], rung: int, signals: Sequence[str]) -> dict[str, float]:
    """Per integrity column: the largest value seen with the right cache, and a margin of its
    distance to the median."""
    columns = columns_of(s for s in signals if SIGNALS[s].integrity)
    rows, _, _ = matrix(items, rung, columns)
    if not len(rows):
        return {}
    top, middle = rows.max(0), np.median(rows, 0)
    limits = {}
    for column, most, usual in zip(columns, top, middle, strict=True):
        # The thousandth is for columns that never vary: without it their own value plus rounding
        # would exceed the limit.
        limits[column] = float(f"{most + MARGIN * (most - usual) + 1e-3:.6g}")
    return limits


def scores_of(items: Sequence[GatedItem], rungs: Sequence[Rung]) -> Doubles:
    """Scores `[items, rungs]`; infinite where the rung refuses whatever the threshold, and where
    the ladder never comes: after an attempt that ended before the gate or without a number, and
    where a prefill is cheaper."""
    scores = np.full((len(items), len(rungs)), np.inf)
    for number, rung in enumerate(rungs):
        names = list(dict.fromkeys((*rung.score.columns, *rung.limits)))
        rows, _, at = matrix(items, number, names)
        if not at:
            continue
        values = rung.score.of(rows[:, [names.index(c) for c in rung.score.columns]])
        for column, limit in rung.limits.items():
            values = np.where(rows[:, names.index(column)] <= limit, values, np.inf)
        scores[at, number] = np.where(np.isfinite(values), values, np.inf)
    for row, item in enumerate(items):
        scores[row, _rungs_reached(item, len(rungs)) :] = np.inf
    return scores


def _rungs_reached(item: GatedItem, rungs: int) -> int:
    """How many rungs the ladder may try, by the rule of `ladder.Ladder`: it ends after an attempt
    that never came to the gate, and where what was spent and another attempt like the last would
    cost a prefill or more."""
    spent = 0
    for number, attempt in enumerate(item.attempts[: rungs - 1], start=1):
        spent += attempt.flops
        if attempt.columns is None or spent + attempt.flops >= item.prefill > 0:
            return number
    return rungs


def routed(
    items: Sequence[GatedItem], scores: Doubles, stop: float
) -> tuple[Doubles, NDArray[np.bool_]]:
    """Where each request ends, by the rule of `ladder.Ladder`: on the first rung whose score is at
    most `stop`. Its score there `[items]`, infinite where no rung is, and whether it is damaged
    there `[items]`."""
    fine = scores <= stop
    first = fine.argmax(1)
    score = np.where(fine.any(1), np.take_along_axis(scores, first[:, None], 1)[:, 0], np.inf)
    ended = [item.attempts[rung] for item, rung in zip(items, first, strict=True)]
    damaged = np.array([attempt.damaged for attempt in ended], dtype=bool)
    return score, damaged & np.isfinite(score)


def counts_at(
    score: Doubles, damaged: NDArray[np.bool_], thresholds: Sequence[float]
) -> list[tuple[float, int, int]]:
    """(threshold, accepted, damaged among them) for each threshold, of what `routed` gives."""
    counts = []
    for threshold in thresholds:
        accepted = score <= threshold
        counts.append((float(threshold), int(accepted.sum()), int(damaged[accepted].sum())))
    return counts


def as_columns(items: Sequence[GatedItem], rung: int) -> dict[str, list[float]]:
    """Every column of the requests that reached the gate on this rung."""
    attempts = [item.attempts[rung] for item in items]
    rows = [attempt.columns for attempt in attempts if attempt.columns is not None]
    names = rows[0] if rows else ()
    return {name: [row[name] for row in rows] for name in names}
