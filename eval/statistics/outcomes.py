"""Paired 0/1 outcomes: what was gained and what was lost, tests of it, and how many items they
need.

Names: s sender, d receiver after its own (dense) prefill, t translated, g gated; each `[items]`,
aligned by item, with `clusters` `[items]` naming the document. Intervals are
`bootstrap.ratio_interval`'s. What cannot be computed honestly from the given items is a `NotShown`
value with its reason, not an exception.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from kvbridge.errors import EvalError
from kvbridge.eval.statistics.bootstrap import FloatArray, Interval, NotShown, ratio_interval
from kvbridge.eval.statistics.means import (
    Clusters,
    as_array,
    as_share,
    difference,
    documents_of,
    proportion,
)


def _binary(values: ArrayLike, name: str) -> FloatArray:
    array = as_array(values)
    if not np.isin(array, (0.0, 1.0)).all():
        raise EvalError(
            f"{name} must hold 0 or 1, found {sorted(set(array[~np.isin(array, (0.0, 1.0))]))[:3]}"
        )
    return array


@dataclass(frozen=True)
class McNemar:
    """Discordant pairs and the exact two-sided p-value."""

    only_first: int
    only_second: int
    p: float


def mcnemar_exact(first: ArrayLike, second: ArrayLike) -> McNemar:
    """Exact McNemar test of two paired 0/1 arrays `[items]`: the binomial test of b out of b + c at
    ½.

    Takes items as independent; with several items a document the clustered interval is the one to
    trust.
    """
    a, b = _binary(first, "first"), _binary(second, "second")
    only_first, only_second = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
    discordant = only_first + only_second
    p = float(stats.binomtest(only_first, discordant, 0.5).pvalue) if discordant else 1.0
    return McNemar(only_first, only_second, p)


@dataclass(frozen=True)
class Identity:
    """t − s taken apart: `difference = gain − harm`, exactly, in item counts.

    `gain = P(s✗)·P(t✓|s✗)`, won where escalation was needed; `harm = P(s✓)·P(t✗|s✓)`, lost where it
    was not.
    """

    items: int
    gained: int
    harmed: int
    sender_wrong: int
    difference: Interval
    gain: Interval
    harm: Interval
    gain_given_wrong: Interval | NotShown
    harm_given_right: Interval | NotShown


def identity(t: ArrayLike, s: ArrayLike, clusters: Clusters, *, seed: int = 0) -> Identity:
    """Split t − s of paired 0/1 arrays `[items]` into gain and harm, each with its interval."""
    translated, sender = _binary(t, "t"), _binary(s, "s")
    gained, harmed = (1 - sender) * translated, sender * (1 - translated)
    wrong = int((1 - sender).sum())

    def given(part: FloatArray, whole: FloatArray, what: str) -> Interval | NotShown:
        if whole.sum() == 0:
            return NotShown(f"no item where the sender is {what}")
        return as_share(
            ratio_interval(part, whole, clusters, seed=seed), documents_of(clusters, whole)
        )

    return Identity(
        items=len(sender),
        gained=int(gained.sum()),
        harmed=int(harmed.sum()),
        sender_wrong=wrong,
        difference=difference(translated, sender, clusters, seed=seed),
        gain=proportion(gained, clusters, seed=seed),
        harm=proportion(harmed, clusters, seed=seed),
        gain_given_wrong=given(gained, 1 - sender, "wrong"),
        harm_given_right=given(harmed, sender, "right"),
    )


def items_for_half_width(result: Interval, items: int, half_width: float = 0.02) -> int | None:
    """How many items would give a 95 % interval of ± `half_width`, from one measured on `items`
    items.

    `n = items · (h_now / half_width)²`: widths shrink with the root of the items while items per
    document stay the same, so the clustering seen is the clustering planned for. None where nothing
    was measured or no document differs from another: such a width says nothing of the spread.
    """
    if not result.known or not result.resampled or result.low == result.high or items <= 0:
        return None
    return max(1, int(np.ceil(items * ((result.high - result.low) / 2 / half_width) ** 2 - 1e-9)))


def holm(p_values: ArrayLike) -> FloatArray:
    """Holm's adjusted p-values (1979) `[tests]`: `max_{j≤i} min(1, (m − j + 1) p_(j))`, p
    ascending."""
    p = as_array(p_values)
    if ((p < 0) | (p > 1) | ~np.isfinite(p)).any():
        raise EvalError(f"p-values must lie in [0, 1], found {p.tolist()}")
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(np.minimum(1.0, p[order] * np.arange(len(p), 0, -1)))
    adjusted = np.empty_like(p)
    adjusted[order] = stepped
    return adjusted
