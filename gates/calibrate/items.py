"""Calibration requests as numbers: what the signals said on each rung, and whether it was damaged. Arrays, no models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbridge.gates.decide.score import Score
from kvbridge.gates.decide.sealed import Rung
from kvbridge.gates.signals import SIGNALS

Floats = NDArray[np.float64]
MARGIN = 0.25


@dataclass(frozen=True)
class Attempt:
    """One rung of one request. `columns` None: refused before the gate. `flops`: handoff and gate together; `gate_flops`: what
    of it each part of the gate took (keys of costs.PARTS), where that is known."""

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
class Item:
    """One request with an attempt per rung, cheapest first. `prefill`: FLOPs of the receiver's own."""

    id: str
    document: str
    tokens: int
    attempts: tuple[Attempt, ...]
    prefill: int = 0


def matrix(
    items: Sequence[Item], rung: int, columns: Sequence[str]
) -> tuple[Floats, NDArray[np.bool_], list[int]]:
    """Rows `[n, columns]`, damage `[n]` and item numbers, of the requests that reached the gate on this rung."""
    at = [i for i, item in enumerate(items) if item.attempts[rung].columns is not None]
    rows = [[items[i].attempts[rung].columns[c] for c in columns] for i in at]  # type: ignore[index]
    damaged = np.array([items[i].attempts[rung].damaged for i in at], dtype=bool)
    return np.array(rows, dtype=np.float64).reshape(len(at), len(columns)), damaged, at


def limits_of(items: Sequence[Item], rung: int, signals: Sequence[str]) -> dict[str, float]:
    """Per integrity column: the largest value seen with the right cache, and a margin of its distance to the median."""
    columns = [c for s in signals if SIGNALS[s].integrity for c in SIGNALS[s].columns]
    rows, _, _ = matrix(items, rung, columns)
    if not len(rows):
        return {}
    top, middle = rows.max(0), np.median(rows, 0)
    return {
        c: float(f"{t + MARGIN * (t - m) + 1e-3:.6g}")
        for c, t, m in zip(columns, top, middle, strict=True)
    }


def scores_of(items: Sequence[Item], rungs: Sequence[Rung]) -> Floats:
    """Scores `[items, rungs]`; infinite where the rung refuses whatever the threshold, and where the ladder never comes: after
    an attempt that ended before the gate or without a number, and where a prefill is cheaper."""
    found = np.full((len(items), len(rungs)), np.inf)
    for number, rung in enumerate(rungs):
        score: Score = rung.score
        names = list(dict.fromkeys((*score.columns, *rung.limits)))
        rows, _, at = matrix(items, number, names)
        if not at:
            continue
        values = score.of(rows[:, [names.index(c) for c in score.columns]])
        for column, limit in rung.limits.items():
            values = np.where(rows[:, names.index(column)] <= limit, values, np.inf)
        found[at, number] = np.where(np.isfinite(values), values, np.inf)
    for i, item in enumerate(items):
        spent = 0
        for number in range(1, len(rungs)):
            spent += item.attempts[number - 1].flops
            ended = item.attempts[number - 1].columns is None
            if ended or spent + item.attempts[number - 1].flops >= item.prefill > 0:
                found[i, number:] = np.inf
                break
    return found


def routed(items: Sequence[Item], scores: Floats, stop: float) -> tuple[Floats, NDArray[np.bool_]]:
    """Where each request ends, by the rule of `policy.Ladder`: on the first rung whose score is at most `stop`. Its score there
    `[items]`, infinite where no rung is, and whether it is damaged there `[items]`."""
    fine = scores <= stop
    first = fine.argmax(1)
    score = np.where(fine.any(1), np.take_along_axis(scores, first[:, None], 1)[:, 0], np.inf)
    damaged = np.array(
        [item.attempts[r].damaged for item, r in zip(items, first, strict=True)], dtype=bool
    )
    return score, damaged & np.isfinite(score)


def counts_at(
    score: Floats, damaged: NDArray[np.bool_], thresholds: Sequence[float]
) -> list[tuple[float, int, int]]:
    """(threshold, accepted, damaged among them) for each threshold, of what `routed` gives."""
    return [(float(t), int((score <= t).sum()), int(damaged[score <= t].sum())) for t in thresholds]


def as_columns(items: Sequence[Item], rung: int) -> dict[str, list[float]]:
    """Every column of the requests that reached the gate on this rung."""
    rows: list[Mapping[str, Any]] = [
        c for item in items if (c := item.attempts[rung].columns) is not None
    ]
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}
