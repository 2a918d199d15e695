"""What a router's or a gate's score buys: call–performance curves and risk–coverage curves.

RouteLLM's figures (arXiv 2406.18665): a router sends an item to the strong model when its score
reaches a threshold; moving the threshold traces performance against the share of calls the strong
model gets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from kvbridge.errors import EvalError
from kvbridge.eval.statistics.bootstrap import FloatArray, NotShown


def _checked(name: str, *arrays: ArrayLike) -> list[FloatArray]:
    checked = [np.asarray(array, dtype=np.float64) for array in arrays]
    if len({array.shape for array in checked}) != 1 or checked[0].ndim != 1 or not len(checked[0]):
        raise EvalError(
            f"{name} needs arrays [items] of one length ≥ 1, found {[a.shape for a in checked]}"
        )
    if not all(np.isfinite(array).all() for array in checked):
        raise EvalError(f"{name} met NaN or infinity: exclude and count these items first")
    return checked


@dataclass(frozen=True)
class CallCurve:
    """Mean performance against the strong model's share of calls, both `[points]`, from no call to
    all."""

    calls: FloatArray
    performance: FloatArray

    def recovered(self) -> FloatArray | NotShown:
        """PGR at each point: `(r − r_weak) / (r_strong − r_weak)` `[points]`."""
        weak, strong = self.performance[0], self.performance[-1]
        if strong <= weak:
            return NotShown(
                f"the strong model scores {strong:.4g}, not above the weak one's {weak:.4g}"
            )
        return (self.performance - weak) / (strong - weak)

    def apgr(self) -> float | NotShown:
        """Average PGR over the share of calls, `∫₀¹ PGR dc` by trapezoids; 0.5 is a random
        router."""
        gap = self.recovered()
        return gap if isinstance(gap, NotShown) else float(np.trapezoid(gap, self.calls))

    def cpt(self, share: float) -> float | NotShown:
        """CPT(x): the least share of calls at which PGR reaches `share`, interpolated between
        thresholds."""
        gap = self.recovered()
        if isinstance(gap, NotShown):
            return gap
        reached = int(np.argmax(gap >= share))
        if reached == 0:
            return 0.0 if gap[0] >= share else NotShown(f"PGR never reaches {share:.0%}")
        before, after = gap[reached - 1], gap[reached]
        part = (share - before) / (after - before)
        return float(
            self.calls[reached - 1] + part * (self.calls[reached] - self.calls[reached - 1])
        )


def call_curve(weak: ArrayLike, strong: ArrayLike, score: ArrayLike) -> CallCurve:
    """The curve of sending the items of highest `score` to the strong model first; all arrays
    `[items]`.

    Items of equal score move together, so the curve has one point per distinct score, plus the one
    without any call.
    """
    w, s, order_by = _checked("a call curve", weak, strong, score)
    ends, gained = _grouped(s - w, -order_by)
    base = float(w.mean())
    return CallCurve(
        np.concatenate([[0.0], ends / len(w)]), np.concatenate([[base], base + gained / len(w)])
    )


@dataclass(frozen=True)
class RiskCoverage:
    """Mean loss of the accepted items against the share accepted, both `[points]`, coverage rising
    to 1."""

    coverage: FloatArray
    risk: FloatArray
    aurc: float
    excess: float


def risk_coverage(loss: ArrayLike, risk_score: ArrayLike) -> RiskCoverage:
    """Selective risk when items are accepted from the lowest `risk_score` upwards; both `[items]`.

    AURC is `1/n Σ_k (1/k) Σ_{i≤k} loss_(i)` (Geifman, Uziel & El-Yaniv, arXiv 1805.08206), its mean
    over all orders of tied scores; `excess` subtracts that of the best possible order.
    """
    losses, scores = _checked("a risk-coverage curve", loss, risk_score)
    ends, cumulated = _grouped(losses, scores)
    aurc, best = _area(losses, scores), _area(losses, losses)
    return RiskCoverage(ends / len(losses), cumulated / ends, aurc, aurc - best)


def _grouped(values: FloatArray, keys: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Running count and sum of `values` at the end of each group of equal `keys`: both
    `[groups]`."""
    distinct, index = np.unique(keys, return_inverse=True)
    counts = np.bincount(index, minlength=len(distinct))
    return np.cumsum(counts).astype(np.float64), np.cumsum(
        np.bincount(index, weights=values, minlength=len(distinct))
    )


def _area(losses: FloatArray, keys: FloatArray) -> float:
    """AURC with each tied group's losses replaced by their mean: the expectation over orders of the
    ties."""
    ends, cumulated = _grouped(losses, keys)
    at = np.arange(1, len(losses) + 1)
    return float(
        (
            np.interp(at, np.concatenate([[0.0], ends]), np.concatenate([[0.0], cumulated])) / at
        ).mean()
    )
