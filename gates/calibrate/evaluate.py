"""What a score is worth, from arrays: separation, detection at a false-alarm rate, savings. No
model is run here."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import rankdata


def auroc(score: ArrayLike, bad: ArrayLike) -> float | None:
    """P(a bad item scores above a good one), ties half; None where one kind is missing."""
    values, wrong = np.asarray(score, dtype=np.float64), np.asarray(bad, dtype=bool)
    ones, zeros = int(wrong.sum()), int((~wrong).sum())
    if not ones or not zeros:
        return None
    # The Mann–Whitney U statistic over its largest value; tied ranks are averaged, which counts
    # ties half.
    u = rankdata(values)[wrong].sum() - ones * (ones + 1) / 2
    return float(u / (ones * zeros))


def detection(good: ArrayLike, bad: ArrayLike, false_alarms: float) -> float:
    """Share of `bad` scores strictly above the level that at most `false_alarms` of the `good` ones
    exceed."""
    ordered = np.sort(np.asarray(good, dtype=np.float64))
    level = ordered[len(ordered) - 1 - int(false_alarms * len(ordered))]
    return float((np.asarray(bad, dtype=np.float64) > level).mean())


def net_saving(coverage: float, *, prefill: float, handoff: float, gate: float) -> float:
    """Saved per request, in the units given: coverage · (prefill − handoff − gate) − (1 − coverage)
    · (handoff + gate)."""
    return coverage * (prefill - handoff - gate) - (1 - coverage) * (handoff + gate)


def table_of(columns: Mapping[str, ArrayLike], bad: ArrayLike) -> dict[str, float]:
    """AUROC of each column `[items]` for `bad` `[items]`; columns with NaN, or without both kinds,
    are left out."""
    table = {}
    for name, values in columns.items():
        array = np.asarray(values, dtype=np.float64)
        value = auroc(array, bad) if np.isfinite(array).all() else None
        if value is not None and math.isfinite(value):
            table[name] = value
    return table
