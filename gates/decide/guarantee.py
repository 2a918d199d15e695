"""Finite-sample statements about a threshold: exact binomial tails, Learn-then-Test, conformal risk
control.

Items are taken as independent draws from what the gate will see; several requests of one document
are less than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import beta, binom

from kvbridge.codec import Index, Share
from kvbridge.errors import UsageError


def p_value(failures: int, items: int, alpha: float) -> float:
    """P(at most `failures` of `items` fail) where each fails with probability α: the exact p-value
    of "risk > α"."""
    return 1.0 if items == 0 else float(binom.cdf(failures, items, alpha))


def items_needed(alpha: float, delta: float, failures: int = 0) -> int:
    """Fewest accepted items of which `failures` may fail so that risk ≤ α holds at confidence 1 −
    δ."""
    check_levels(alpha, delta)
    # The p-value falls with every further item: double until it is low enough, then halve between.
    low, high = failures, failures + 1
    while p_value(failures, high, alpha) > delta:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if p_value(failures, middle, alpha) <= delta:
            high = middle
        else:
            low = middle
    return high


def upper_bound(failures: int, items: int, delta: float) -> float:
    """Clopper–Pearson: the risk that is not exceeded at confidence 1 − δ."""
    return 1.0 if failures >= items else float(beta.ppf(1 - delta, failures + 1, items - failures))


def interval(failures: int, items: int, level: float = 0.95) -> tuple[float, float]:
    """Two-sided Clopper–Pearson interval."""
    tail = (1 - level) / 2
    low = 0.0 if failures == 0 else float(beta.ppf(tail, failures, items - failures + 1))
    return low, upper_bound(failures, items, tail)


def check_levels(alpha: float, delta: float) -> None:
    """Raises UsageError unless both lie strictly between 0 and 1."""
    if not 0 < alpha < 1 or not 0 < delta < 1:
        raise UsageError(f"expected alpha and delta between 0 and 1, found {alpha} and {delta}")


@dataclass(frozen=True)
class Tested:
    """A threshold that passed: of `items` accepted `failures` failed, `p` the p-value."""

    threshold: Share
    items: Index
    failures: Index
    p: Share

    def __post_init__(self) -> None:
        if self.failures > self.items:
            raise UsageError(f"expected at most {self.items} failures, found {self.failures}")


def fixed_sequence(
    counts: Sequence[tuple[float, int, int]], alpha: float, delta: float
) -> Tested | None:
    """Learn-then-Test (arXiv 2110.01052) with fixed-sequence testing: `counts` are (threshold,
    accepted, failed) in an order fixed without looking at these items' labels. Tests "risk > α" one
    after the other, each at level δ, stops at the first that is not rejected, and returns the last
    rejected; None where the first was not.
    """
    check_levels(alpha, delta)
    passed = None
    for threshold, items, failures in counts:
        p = p_value(failures, items, alpha)
        # No δ is split among the tests: an error takes the rejection of the first threshold whose
        # risk is above α, and that one is tested once. Going on after a failure would undo this.
        if p > delta:
            break
        passed = Tested(threshold, items, failures, p)
    return passed


def start_at(counts: Sequence[tuple[float, int, int]], share: float, alpha: float) -> int:
    """Where a fixed sequence should begin, judged on other items: the threshold with the smallest
    p-value, had it `share` times as many items. `counts` as in fixed_sequence, thresholds
    ascending."""
    scaled = [p_value(round(share * k), round(share * n), alpha) for _, n, k in counts]
    return int(np.argmin(scaled)) if scaled else 0


def conformal_threshold(scores: ArrayLike, damaged: ArrayLike, alpha: float) -> float | None:
    """Conformal risk control (arXiv 2208.02814) of P(accepted and damaged) ≤ α in expectation: the
    largest score of `scores` `[items]` at which (Σ damaged among score ≤ threshold + 1) / (items +
    1) ≤ α; None where there is none."""
    score, bad = np.asarray(scores, dtype=np.float64), np.asarray(damaged, dtype=np.float64)
    order = np.argsort(score, kind="stable")
    ordered = score[order]
    # The request to come counts as damaged, whatever it is: that is the + 1 above and below.
    risk = (np.cumsum(bad[order]) + 1) / (len(score) + 1)
    # Equal scores are accepted together, so only the last of them may be a threshold.
    last = np.append(ordered[1:] != ordered[:-1], True)
    allowed = np.flatnonzero(last & (risk <= alpha))
    return float(ordered[allowed[-1]]) if len(allowed) else None
