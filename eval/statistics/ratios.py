"""The ratios that a table of paired rows is read by, as pure functions of per-item arrays.

Names: s sender, d receiver after its own (dense) prefill, t translated, g gated; each `[items]`,
aligned by item, with `clusters` `[items]` naming the document. Intervals are
`bootstrap.ratio_interval`'s. What cannot be computed honestly from the given items is a `NotShown`
value with its reason, not an exception.
"""

from __future__ import annotations

from numpy.typing import ArrayLike

from kvbridge.eval.statistics.bootstrap import Interval, NotShown, ratio_interval
from kvbridge.eval.statistics.means import Clusters, as_array, difference, mean, without_bounds

FEW_DOCUMENTS = 10
"""Below this an uncertain denominator costs a ratio its interval, not its value: a smoke run shows
figures."""


def retention(
    t: ArrayLike, d: ArrayLike, clusters: Clusters, *, seed: int = 0
) -> Interval | NotShown:
    """Standalone retention Σt / Σd. Says nothing about whether switching was worth it."""
    if as_array(d).sum() == 0:
        return NotShown("the receiver scores 0 after its own prefill")
    return _bounded(t, d, clusters, "the receiver's own score", seed)


def floor_normalised(
    t: ArrayLike, d: ArrayLike, chance: ArrayLike, clusters: Clusters, *, seed: int = 0
) -> Interval | NotShown:
    """Retention above guessing, Σ(t − chance) / Σ(d − chance), `chance` per item `[items]`."""
    above = as_array(d) - as_array(chance)
    check = mean(above, clusters, seed=seed)
    if not check.above(0):
        return NotShown(f"the receiver is not above chance: d − chance {_shown(check)}")
    return _bounded(
        as_array(t) - as_array(chance), above, clusters, "the receiver's score above chance", seed
    )


def gap_recovered(
    s: ArrayLike, d: ArrayLike, g: ArrayLike, clusters: Clusters, *, seed: int = 0
) -> Interval | NotShown:
    """Cascading share of the gap, Σ(g − s) / Σ(d − s); for losses pass them negated.

    NotShown where the interval of d − s contains 0 (a share of a gap that may not exist) or lies
    below it.
    """
    gap = difference(d, s, clusters, seed=seed)
    if not gap.known:
        return NotShown(
            "no interval of d − s: too few documents, or none that differs from another"
        )
    if gap.contains(0):
        return NotShown(
            f"receiver and sender are not told apart: the interval of d − s {_shown(gap)} "
            "contains 0"
        )
    if gap.below(0):
        return NotShown(
            f"the receiver alone does worse than the sender, d − s {_shown(gap)}: there is no "
            "gap to recover"
        )
    return _bounded(as_array(g) - as_array(s), as_array(d) - as_array(s), clusters, "d − s", seed)


def recovery(
    loss: ArrayLike, native: ArrayLike, floor: ArrayLike, clusters: Clusters, *, seed: int = 0
) -> Interval | NotShown:
    """`(loss_no_context − loss) / (loss_no_context − loss_native)`, a ratio of sums over items
    of nats `[items]`.

    All three over the same characters, so the share in nats per character is the share in nats. 1
    is the receiver's own prefill, 0 no context at all; neither is a bound.
    """
    lost, whole = as_array(floor) - as_array(loss), as_array(floor) - as_array(native)
    check = mean(whole, clusters, seed=seed)
    if check.estimate <= 0 or (check.contains(0) and len(set(clusters)) >= FEW_DOCUMENTS):
        return NotShown(
            f"context does not help the receiver: loss_no_context − loss_native {_shown(check)}"
        )
    return _ratio(lost, whole, clusters, "loss_no_context − loss_native", seed)


def _bounded(
    n: ArrayLike, d: ArrayLike, clusters: Clusters, name: str, seed: int
) -> Interval | NotShown:
    """A ratio without an interval where no document differs from another."""
    ratio = _ratio(n, d, clusters, name, seed)
    return without_bounds(ratio) if isinstance(ratio, Interval) else ratio


def _ratio(
    n: ArrayLike, d: ArrayLike, clusters: Clusters, name: str, seed: int
) -> Interval | NotShown:
    result = ratio_interval(n, d, clusters, seed=seed)
    if len(set(clusters)) >= FEW_DOCUMENTS and not result.known:
        return NotShown(f"{name} cannot be told from 0")
    return result


def _shown(interval: Interval) -> str:
    return (
        f"[{interval.low:.4g}, {interval.high:.4g}]"
        if interval.known
        else f"{interval.estimate:.4g}, no interval"
    )
