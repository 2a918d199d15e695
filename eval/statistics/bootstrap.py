"""Confidence intervals for paired rows that are clustered by document.

Items cut from one document are not independent, so whole documents are resampled. Everything
reported is a ratio of two sums over items (a mean is a sum over a count, a recovery a difference of
losses over another), so one pair of columns per item is all the state there is, and a matrix
product of resampling weights with per-document sums gives all replicates.

Three methods share that form; `studentised` is the one used, alone in having p-values without a
floor. Simulated coverage of each: `python -m benchmarks.coverage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from kvbridge.errors import EvalError

FloatArray = NDArray[np.float64]

REPETITIONS = 2000
_CACHED_WEIGHTS = 4_000_000
_LEAST_VARIANCE = 0.4**2
TAIL = 10
"""Replicates beyond the observed value below which a p-value is read from the fitted tail instead
of counted."""
RESOLVED = 2 * (TAIL + 1) / (REPETITIONS + 1)
"""Two-sided p-values below this come from the tail, not from counting."""


@dataclass(frozen=True)
class Interval:
    """An estimate and its two-sided interval, NaN where none can be given; `p` tests against 0.
    `resampled`: whether the bounds are from resampling; not where no document differs from
    another."""

    estimate: float
    low: float
    high: float
    p: float = float("nan")
    resampled: bool = True

    @property
    def known(self) -> bool:
        return not (np.isnan(self.low) or np.isnan(self.high))

    def contains(self, value: float) -> bool:
        return self.known and self.low <= value <= self.high

    def above(self, value: float) -> bool:
        return self.known and self.low > value

    def below(self, value: float) -> bool:
        return self.known and self.high < value

    def clipped(self, low: float, high: float) -> Interval:
        """The same interval cut to the range the quantity can take."""
        bounds = np.clip([self.low, self.high], low, high)
        return replace(self, low=float(bounds[0]), high=float(bounds[1]))


@dataclass(frozen=True)
class NotShown:
    """A figure that these items cannot support; `because` completes "not shown: …"."""

    because: str


def cluster_sums(
    numerator: ArrayLike, denominator: ArrayLike, clusters: Sequence[str]
) -> FloatArray:
    """Sums of both columns `[items]` within each label of `clusters` `[items]`: `[clusters, 2]`.

    Clusters are ordered by label and items by value, so a permutation of the rows changes no bit of
    the result. Raises EvalError on empty, non-finite or unequally long input.
    """
    values = np.column_stack(
        [np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)]
    )
    if len(values) == 0:
        raise EvalError(
            "no items to estimate from: run at least one item of this task and condition"
        )
    if len(values) != len(clusters):
        raise EvalError(
            f"expected one cluster label per item, found {len(clusters)} labels for {len(values)} "
            "items"
        )
    if not np.isfinite(values).all():
        raise EvalError("found NaN or infinity among the items: exclude and count these first")
    labels, index = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)
    order = np.lexsort((values[:, 1], values[:, 0], index))
    sums = np.zeros((len(labels), 2))
    np.add.at(sums, index[order], values[order])
    return sums


@lru_cache(maxsize=4)
def _weights(clusters: int, repetitions: int, seed: int) -> FloatArray:
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=repetitions).astype(
        np.float64
    )
    drawn.flags.writeable = False
    return drawn


def resampled(columns: FloatArray, repetitions: int, seed: int) -> FloatArray:
    """Column sums of bootstrap samples of clusters: `[clusters, columns]` to `[repetitions,
    columns]`.

    The draws depend on the number of clusters, `repetitions` and `seed` only; many clusters are
    drawn in chunks.
    """
    clusters = len(columns)
    if clusters * repetitions <= _CACHED_WEIGHTS:
        return _weights(clusters, repetitions, seed) @ columns
    rng = np.random.default_rng(seed)
    share, step = np.full(clusters, 1 / clusters), max(1, _CACHED_WEIGHTS // clusters)
    counts = [min(step, repetitions - start) for start in range(0, repetitions, step)]
    return np.concatenate(
        [rng.multinomial(clusters, share, size=count) @ columns for count in counts]
    )


def _residual_error(sums: FloatArray, ratio: float) -> float:
    """Standard error of N − ρD over documents: `sqrt(K/(K−1) Σ_k (e_k − ē)²)` with `e_k = n_k − ρ
    d_k`."""
    clusters, residual = len(sums), sums[:, 0] - ratio * sums[:, 1]
    return float(np.sqrt(clusters / (clusters - 1) * ((residual - residual.mean()) ** 2).sum()))


def _percentile(
    sums: FloatArray, tails: FloatArray, repetitions: int, seed: int
) -> tuple[FloatArray, float]:
    """Efron's percentile interval: quantiles of the replicates. Too short for skewed ratios."""
    totals = resampled(sums, repetitions, seed)
    values = totals[:, 0] / totals[:, 1]
    values = values[np.isfinite(values)]
    return np.quantile(values, tails), _two_sided(
        (values <= 0).sum(), (values >= 0).sum(), len(values)
    )


def _bca(
    sums: FloatArray, tails: FloatArray, repetitions: int, seed: int
) -> tuple[FloatArray, float]:
    """Bias-corrected and accelerated (Efron 1987), with the acceleration from leaving one document
    out."""
    total, replicates = sums.sum(axis=0), resampled(sums, repetitions, seed)
    estimate, values = total[0] / total[1], replicates[:, 0] / replicates[:, 1]
    values = values[np.isfinite(values)]
    p = _two_sided((values <= 0).sum(), (values >= 0).sum(), len(values))
    without = (total - sums)[:, 0] / (total - sums)[:, 1]
    deviation = without.mean() - without
    spread, share = (
        (deviation**2).sum(),
        ((values < estimate).mean() + (values <= estimate).mean()) / 2,
    )
    if spread == 0 or not 0 < share < 1:
        return np.quantile(values, tails), p
    bias, acceleration = stats.norm.ppf(share), (deviation**3).sum() / (6 * spread**1.5)
    shifted = bias + stats.norm.ppf(tails)
    return np.quantile(values, stats.norm.cdf(bias + shifted / (1 - acceleration * shifted))), p


def _studentised(
    sums: FloatArray, tails: FloatArray, repetitions: int, seed: int
) -> tuple[FloatArray, float]:
    """Bootstrap-t (Efron & Tibshirani 1993, ch. 12) on N − ρD, inverted for ρ as Fieller (1954)
    does.

    Pivot `T(ρ) = (N − ρD) / se(N − ρD)`; its bootstrap quantiles q replace Student's, and the bound
    solves T(ρ) = q, a quadratic in ρ. The residual N − ρD is a plain sum, so T stays close to
    pivotal where a ratio over its own standard error does not. The bounds are NaN where D cannot be
    told from 0.

    Two corrections, both chosen by simulated coverage: a replicate's standard error counts as at
    least 0.4 of the sample's (with few events some replicates hold none of them and their pivots
    explode), and the pivots are stretched by t/z for K − 1 degrees of freedom (a replicate repeats
    documents and so has thinner tails).
    """
    clusters, total = len(sums), sums.sum(axis=0)
    if total[1] < 0:
        sums, total = -sums, -total
    residual = sums[:, 0] - total[0] / total[1] * sums[:, 1]
    moments = resampled(np.column_stack([residual, residual**2]), repetitions, seed)
    variance = np.maximum(
        moments[:, 1] - moments[:, 0] ** 2 / clusters, _LEAST_VARIANCE * (residual**2).sum()
    )
    stretch = stats.t.ppf(tails[1], clusters - 1) / stats.norm.ppf(tails[1])
    pivots = stretch * moments[:, 0] / np.sqrt(variance * clusters / (clusters - 1))
    low, high = np.quantile(pivots, tails)
    centred = sums - sums.mean(axis=0)
    spread = clusters / (clusters - 1) * centred.T @ centred
    observed = (
        total[0] / error
        if (error := _residual_error(sums, 0.0)) > 0
        else np.copysign(np.inf, total[0])
    )
    return np.array([_solve(total, spread, high), _solve(total, spread, low)]), _tailed(
        pivots, observed
    )


def _tailed(pivots: FloatArray, observed: float) -> float:
    """Two-sided p of `observed` among bootstrap `pivots` `[replicates]`, with no floor at
    2/(replicates + 1).

    Counted while at least TAIL replicates lie beyond. Further out the tail is a power law through
    the quantiles of the TAIL and of the 10 TAIL outermost replicates (Hill's idea with two order
    statistics): heavier than the normal's or Student's tail beyond these points, so what it says is
    on the safe side also for skewed documents.
    """
    below, above, count = (
        int((pivots <= observed).sum()),
        int((pivots >= observed).sum()),
        len(pivots),
    )
    counted = _two_sided(below, above, count)
    if min(below, above) >= TAIL or count < 40 * TAIL:
        return counted
    outwards = np.sort((1.0 if above < below else -1.0) * pivots)[::-1]
    near, edge, reached = outwards[10 * TAIL - 1], outwards[TAIL - 1], abs(observed)
    if not 0 < near < edge <= reached:
        return counted
    exponent = np.log(10) / np.log(edge / near)
    return float(2 * (TAIL + 1) / (count + 1) * (edge / reached) ** exponent)


def _solve(total: FloatArray, spread: FloatArray, quantile: float) -> float:
    """The ρ at which (N − ρD)/se(N − ρD) is `quantile`, from totals `[2]` and their covariance `[2,
    2]`."""
    square = quantile**2
    a = total[1] ** 2 - square * spread[1, 1]
    b = total[0] * total[1] - square * spread[0, 1]
    c = total[0] ** 2 - square * spread[0, 0]
    if a <= 0:
        return float("nan")
    return float((b - np.sign(quantile) * np.sqrt(max(b * b - a * c, 0.0))) / a)


def _two_sided(below: int, above: int, count: int) -> float:
    """Bootstrap p-value with the observed sample counted in (Davison & Hinkley 1997, eq. 4.11)."""
    return float(min(1.0, 2 * (min(below, above) + 1) / (count + 1)))


METHODS = {"percentile": _percentile, "bca": _bca, "studentised": _studentised}


def ratio_interval(
    numerator: ArrayLike,
    denominator: ArrayLike,
    clusters: Sequence[str],
    *,
    confidence: float = 0.95,
    method: str = "studentised",
    repetitions: int = REPETITIONS,
    seed: int = 0,
) -> Interval:
    """Interval of Σ numerator / Σ denominator, both `[items]`, with `clusters` `[items]` resampled
    whole.

    The bounds are NaN with fewer than two clusters, with a denominator that sums to 0 (the estimate
    is NaN, too) or that cannot be told from 0. With no variance between clusters the interval is a
    point, and p that of the sign test. Deterministic by `seed`.
    """
    sums = cluster_sums(numerator, denominator, clusters)
    total = sums.sum(axis=0)
    estimate = float(total[0] / total[1]) if total[1] != 0 else float("nan")
    if len(sums) < 2 or np.isnan(estimate):
        return Interval(estimate, float("nan"), float("nan"))
    if _residual_error(sums, estimate) <= 1e-12 * float(np.abs(sums[:, 0]).sum()):
        signed = int(np.count_nonzero(sums[:, 0]))
        return Interval(estimate, estimate, estimate, min(1.0, 2 * 0.5**signed), resampled=False)
    tail = (1 - confidence) / 2
    with np.errstate(all="ignore"):
        (low, high), p = METHODS[method](sums, np.array([tail, 1 - tail]), repetitions, seed)
    return Interval(estimate, float(low), float(high), p)
