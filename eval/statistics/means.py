"""Means, shares and paired differences of per-item arrays, each with its interval.

Arrays are `[items]`, with `clusters` `[items]` naming the document. Intervals are
`bootstrap.ratio_interval`'s; where nothing can be resampled, those of a closed form or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from kvbridge.errors import EvalError
from kvbridge.eval.statistics.bootstrap import FloatArray, Interval, ratio_interval

Clusters = Sequence[str]


def as_array(values: ArrayLike) -> FloatArray:
    """Values `[items]` as float64."""
    return np.asarray(values, dtype=np.float64)


def mean(values: ArrayLike, clusters: Clusters, *, seed: int = 0) -> Interval:
    """Mean per item, Σ x / n."""
    array = as_array(values)
    return ratio_interval(array, np.ones_like(array), clusters, seed=seed)


def proportion(values: ArrayLike, clusters: Clusters, *, seed: int = 0) -> Interval:
    """Mean of values in [0, 1], the interval cut to that range.

    Where no document differs from another (all right, say) nothing can be resampled: Wilson's
    interval over the number of documents stands in, which treats the items of a document as one.
    """
    array = as_array(values)
    if ((array < 0) | (array > 1)).any():
        raise EvalError(
            f"a share must lie in [0, 1], found values from {array.min():g} to {array.max():g}"
        )
    return as_share(mean(array, clusters, seed=seed), documents_of(clusters, np.ones_like(array)))


def as_share(result: Interval, documents: int) -> Interval:
    """An interval cut to [0, 1]; Wilson's over `documents` where it is a point."""
    if result.low == result.high and documents > 1:
        low, high = wilson(result.estimate * documents, documents)
        return replace(result, low=low, high=high)
    return result.clipped(0.0, 1.0)


def documents_of(clusters: Clusters, weight: FloatArray) -> int:
    """Number of documents with any `weight` `[items]`."""
    return len({cluster for cluster, w in zip(clusters, weight, strict=True) if w > 0})


def difference(a: ArrayLike, b: ArrayLike, clusters: Clusters, *, seed: int = 0) -> Interval:
    """Paired mean difference, Σ (a − b) / n; `p` is two-sided against 0.

    Where no document differs from another nothing can be resampled: differences of 0/1 outcomes get
    an exact bound over documents, others no interval.
    """
    apart = as_array(a) - as_array(b)
    average = mean(apart, clusters, seed=seed)
    if average.resampled:
        return average
    if not np.isin(apart, (-1.0, 0.0, 1.0)).all():
        return without_bounds(average)
    documents = len(set(clusters))
    if not apart.any():
        # All items are ties: what may be hidden is at most the bound of no event, on either side.
        bound = clopper_pearson(0, documents)[1]
        return replace(average, low=-bound, high=bound)
    # The exact interval is one of a share in [0, 1]; a difference of outcomes lies in [−1, 1].
    share = (average.estimate + 1) / 2
    low, high = (2 * bound - 1 for bound in clopper_pearson(share * documents, documents))
    return replace(average, low=low, high=high)


def without_bounds(result: Interval) -> Interval:
    """The same estimate; no interval where its bounds are not from resampling."""
    return result if result.resampled else replace(result, low=float("nan"), high=float("nan"))


def clopper_pearson(successes: float, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval (1934) by quantiles of the beta distribution, which take parts of a
    success, too.

    With all of `trials` successes it excludes ½ just where the two-sided sign test has p < 1 −
    `confidence`.
    """
    tail = (1 - confidence) / 2
    low = stats.beta.ppf(tail, successes, trials - successes + 1) if successes > 0 else 0.0
    high = (
        stats.beta.ppf(1 - tail, successes + 1, trials - successes) if successes < trials else 1.0
    )
    return float(low), float(high)


def wilson(successes: float, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval (1927) for independent trials.

    `(p + z²/2n ± z sqrt(p(1−p)/n + z²/4n²)) / (1 + z²/n)`. Taken directly, because scipy's wants
    whole successes.
    """
    if trials <= 0 or not 0 <= successes <= trials:
        raise EvalError(
            f"expected 0 ≤ successes ≤ trials and trials > 0, found {successes} of {trials}"
        )
    z2, p = float(stats.norm.ppf((1 + confidence) / 2)) ** 2, successes / trials
    centre = p + z2 / (2 * trials)
    half = (z2 * (p * (1 - p) / trials + z2 / (4 * trials**2))) ** 0.5
    scale = 1 + z2 / trials
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
