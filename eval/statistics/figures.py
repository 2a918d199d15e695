"""The figures of a table of paired rows, as pure functions of per-item arrays.

Names: s sender, d receiver after its own (dense) prefill, t translated, g gated; each `[items]`, aligned by
item, with `clusters` `[items]` naming the document. Intervals are `bootstrap.ratio_interval`'s. What cannot
be computed honestly from the given items is a `Refused` value with its reason, not an exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from kvbridge.errors import EvalError
from kvbridge.eval.statistics.bootstrap import Floats, Interval, ratio_interval

Clusters = Sequence[str]

FEW_DOCUMENTS = 10
"""Below this an uncertain denominator costs a ratio its interval, not its value: a smoke run shows figures."""


@dataclass(frozen=True)
class Refused:
    """A figure that these items cannot support; `because` completes "not shown: …"."""

    because: str


def _array(values: ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64)


def _binary(values: ArrayLike, name: str) -> Floats:
    array = _array(values)
    if not np.isin(array, (0.0, 1.0)).all():
        raise EvalError(
            f"{name} must hold 0 or 1, found {sorted(set(array[~np.isin(array, (0.0, 1.0))]))[:3]}"
        )
    return array


def mean(values: ArrayLike, clusters: Clusters, *, seed: int = 0) -> Interval:
    """Mean per item, Σ x / n."""
    array = _array(values)
    return ratio_interval(array, np.ones_like(array), clusters, seed=seed)


def proportion(values: ArrayLike, clusters: Clusters, *, seed: int = 0) -> Interval:
    """Mean of values in [0, 1], the interval cut to that range.

    Where no document differs from another (all right, say) nothing can be resampled: Wilson's interval over
    the number of documents stands in, which treats the items of a document as one.
    """
    array = _array(values)
    if ((array < 0) | (array > 1)).any():
        raise EvalError(
            f"a share must lie in [0, 1], found values from {array.min():g} to {array.max():g}"
        )
    return _as_share(mean(array, clusters, seed=seed), _documents(clusters, np.ones_like(array)))


def _as_share(result: Interval, documents: int) -> Interval:
    if result.low == result.high and documents > 1:
        low, high = wilson(result.estimate * documents, documents)
        return replace(result, low=low, high=high)
    return result.clipped(0.0, 1.0)


def _documents(clusters: Clusters, weight: Floats) -> int:
    """Number of documents with any `weight` `[items]`."""
    return len({cluster for cluster, w in zip(clusters, weight, strict=True) if w > 0})


def difference(a: ArrayLike, b: ArrayLike, clusters: Clusters, *, seed: int = 0) -> Interval:
    """Paired mean difference, Σ (a − b) / n; `p` is two-sided against 0.

    Where no document differs from another nothing can be resampled: differences of 0/1 outcomes get an exact bound over
    documents, others no interval.
    """
    apart = _array(a) - _array(b)
    found = mean(apart, clusters, seed=seed)
    if found.resampled:
        return found
    if not np.isin(apart, (-1.0, 0.0, 1.0)).all():
        return without_bounds(found)
    documents = len(set(clusters))
    if not apart.any():
        low, high = -clopper_pearson(0, documents)[1], clopper_pearson(0, documents)[1]
    else:
        low, high = (
            2 * bound - 1
            for bound in clopper_pearson((found.estimate + 1) / 2 * documents, documents)
        )
    return replace(found, low=low, high=high)


def without_bounds(found: Interval) -> Interval:
    """The same estimate; no interval where its bounds are not from resampling."""
    return found if found.resampled else replace(found, low=float("nan"), high=float("nan"))


def clopper_pearson(successes: float, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval (1934) by quantiles of the beta distribution, which take parts of a success, too.

    With all of `trials` successes it excludes ½ just where the two-sided sign test has p < 1 − `confidence`.
    """
    tail = (1 - confidence) / 2
    low = stats.beta.ppf(tail, successes, trials - successes + 1) if successes > 0 else 0.0
    high = (
        stats.beta.ppf(1 - tail, successes + 1, trials - successes) if successes < trials else 1.0
    )
    return float(low), float(high)


def wilson(successes: float, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval (1927) for independent trials.

    `(p + z²/2n ± z sqrt(p(1−p)/n + z²/4n²)) / (1 + z²/n)`. Taken directly, because scipy's wants whole
    successes.
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


@dataclass(frozen=True)
class McNemar:
    """Discordant pairs and the exact two-sided p-value."""

    only_first: int
    only_second: int
    p: float


def mcnemar_exact(first: ArrayLike, second: ArrayLike) -> McNemar:
    """Exact McNemar test of two paired 0/1 arrays `[items]`: the binomial test of b out of b + c at ½.

    Takes items as independent; with several items a document the clustered interval is the one to trust.
    """
    a, b = _binary(first, "first"), _binary(second, "second")
    only_first, only_second = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
    discordant = only_first + only_second
    p = float(stats.binomtest(only_first, discordant, 0.5).pvalue) if discordant else 1.0
    return McNemar(only_first, only_second, p)


def retention(
    t: ArrayLike, d: ArrayLike, clusters: Clusters, *, seed: int = 0
) -> Interval | Refused:
    """Standalone retention Σt / Σd. Says nothing about whether switching was worth it."""
    if _array(d).sum() == 0:
        return Refused("the receiver scores 0 after its own prefill")
    return _bounded(t, d, clusters, "the receiver's own score", seed)


def floor_normalised(
    t: ArrayLike, d: ArrayLike, chance: ArrayLike, clusters: Clusters, *, seed: int = 0
) -> Interval | Refused:
    """Retention above guessing, Σ(t − chance) / Σ(d − chance), `chance` per item `[items]`."""
    above = _array(d) - _array(chance)
    check = mean(above, clusters, seed=seed)
    if not check.above(0):
        return Refused(f"the receiver is not above chance: d − chance {_shown(check)}")
    return _bounded(
        _array(t) - _array(chance), above, clusters, "the receiver's score above chance", seed
    )


def gap_recovered(
    s: ArrayLike, d: ArrayLike, g: ArrayLike, clusters: Clusters, *, seed: int = 0
) -> Interval | Refused:
    """Cascading share of the gap, Σ(g − s) / Σ(d − s); for losses pass them negated.

    Refused where the interval of d − s contains 0 (a share of a gap that may not exist) or lies below it.
    """
    gap = difference(d, s, clusters, seed=seed)
    if not gap.known:
        return Refused("no interval of d − s: too few documents, or none that differs from another")
    if gap.contains(0):
        return Refused(
            f"receiver and sender are not told apart: the interval of d − s {_shown(gap)} contains 0"
        )
    if gap.below(0):
        return Refused(
            f"the receiver alone does worse than the sender, d − s {_shown(gap)}: there is no gap to recover"
        )
    return _bounded(_array(g) - _array(s), _array(d) - _array(s), clusters, "d − s", seed)


def recovery(
    loss: ArrayLike, native: ArrayLike, floor: ArrayLike, clusters: Clusters, *, seed: int = 0
) -> Interval | Refused:
    """`(loss_no_context − loss) / (loss_no_context − loss_native)`, a ratio of sums over items
    of nats `[items]`.

    All three over the same characters, so the share in nats per character is the share in nats. 1 is the
    receiver's own prefill, 0 no context at all; neither is a bound.
    """
    lost, whole = _array(floor) - _array(loss), _array(floor) - _array(native)
    check = mean(whole, clusters, seed=seed)
    if check.estimate <= 0 or (check.contains(0) and len(set(clusters)) >= FEW_DOCUMENTS):
        return Refused(
            f"context does not help the receiver: loss_no_context − loss_native {_shown(check)}"
        )
    return _ratio(lost, whole, clusters, "loss_no_context − loss_native", seed)


def _bounded(
    n: ArrayLike, d: ArrayLike, clusters: Clusters, name: str, seed: int
) -> Interval | Refused:
    """A ratio without an interval where no document differs from another."""
    found = _ratio(n, d, clusters, name, seed)
    return without_bounds(found) if isinstance(found, Interval) else found


def _ratio(
    n: ArrayLike, d: ArrayLike, clusters: Clusters, name: str, seed: int
) -> Interval | Refused:
    result = ratio_interval(n, d, clusters, seed=seed)
    if len(set(clusters)) >= FEW_DOCUMENTS and not result.known:
        return Refused(f"{name} cannot be told from 0")
    return result


def _shown(interval: Interval) -> str:
    return (
        f"[{interval.low:.4g}, {interval.high:.4g}]"
        if interval.known
        else f"{interval.estimate:.4g}, no interval"
    )


@dataclass(frozen=True)
class Identity:
    """t − s taken apart: `difference = gain − harm`, exactly, in item counts.

    `gain = P(s✗)·P(t✓|s✗)`, won where escalation was needed; `harm = P(s✓)·P(t✗|s✓)`, lost where it was not.
    """

    items: int
    gained: int
    harmed: int
    sender_wrong: int
    difference: Interval
    gain: Interval
    harm: Interval
    gain_given_wrong: Interval | Refused
    harm_given_right: Interval | Refused


def identity(t: ArrayLike, s: ArrayLike, clusters: Clusters, *, seed: int = 0) -> Identity:
    """Split t − s of paired 0/1 arrays `[items]` into gain and harm, each with its interval."""
    translated, sender = _binary(t, "t"), _binary(s, "s")
    gained, harmed = (1 - sender) * translated, sender * (1 - translated)
    wrong = int((1 - sender).sum())

    def given(part: Floats, whole: Floats, what: str) -> Interval | Refused:
        if whole.sum() == 0:
            return Refused(f"no item where the sender is {what}")
        return _as_share(
            ratio_interval(part, whole, clusters, seed=seed), _documents(clusters, whole)
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
    """How many items would give a 95 % interval of ± `half_width`, from one measured on `items` items.

    `n = items · (h_now / half_width)²`: widths shrink with the root of the items while items per document
    stay the same, so the clustering seen is the clustering planned for. None where nothing was measured or no document
    differs from another: such a width says nothing of the spread.
    """
    if not result.known or not result.resampled or result.low == result.high or items <= 0:
        return None
    return max(1, int(np.ceil(items * ((result.high - result.low) / 2 / half_width) ** 2 - 1e-9)))


def holm(p_values: ArrayLike) -> Floats:
    """Holm's adjusted p-values (1979) `[tests]`: `max_{j≤i} min(1, (m − j + 1) p_(j))`, p ascending."""
    p = _array(p_values)
    if ((p < 0) | (p > 1) | ~np.isfinite(p)).any():
        raise EvalError(f"p-values must lie in [0, 1], found {p.tolist()}")
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(np.minimum(1.0, p[order] * np.arange(len(p), 0, -1)))
    adjusted = np.empty_like(p)
    adjusted[order] = stepped
    return adjusted
