"""Scores, limits and thresholds from calibration requests, and the figures of a part that chose
nothing. No model runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbridge.errors import DataError
from kvbridge.gates.calibrate.config import GateConfig
from kvbridge.gates.calibrate.evaluate import auroc, table_of
from kvbridge.gates.calibrate.items import (
    Attempt,
    Doubles,
    GatedItem,
    as_columns,
    counts_at,
    limits_of,
    matrix,
    routed,
    scores_of,
)
from kvbridge.gates.decide.guarantee import (
    Tested,
    conformal_threshold,
    fixed_sequence,
    interval,
    start_at,
)
from kvbridge.gates.decide.score import fit_score
from kvbridge.gates.decide.sealed import Rung
from kvbridge.gates.signals import SIGNALS, columns_of, parts_of

STEPS = 40


@dataclass(frozen=True)
class Levels:
    """What items gave: rungs, the score at which the ladder stops, both levels, the conformal
    threshold."""

    rungs: tuple[Rung, ...]
    signals: tuple[str, ...]
    stop: float
    strict: Tested | None
    lenient: Tested | None
    conformal: float | None


def applicable(items: Sequence[GatedItem], signals: Sequence[str]) -> tuple[str, ...]:
    """Signals that gave finite numbers for nearly every request on every rung (the rest is dropped
    by name)."""
    attempts = [attempt for item in items for attempt in item.attempts]
    reached = [attempt.columns for attempt in attempts if attempt.columns is not None]
    kept = []
    for name in signals:
        values = np.array([[row[c] for c in SIGNALS[name].columns] for row in reached])
        if reached and float(np.isfinite(values).all(1).mean()) > 0.99:
            kept.append(name)
    return tuple(kept)


def whole(items: Sequence[GatedItem], signals: Sequence[str]) -> list[GatedItem]:
    """The same items as a gate of `signals` sees and pays for them: an attempt with a number
    missing counts as refused, and parts of the work that none of these signals needs cost
    nothing."""
    columns, parts = columns_of(signals), parts_of(signals)

    def seen(attempt: Attempt) -> Attempt:
        paid = attempt.paying(parts)
        if paid.columns is None or all(math.isfinite(paid.columns[c]) for c in columns):
            return paid
        return replace(paid, columns=None)

    return [replace(item, attempts=tuple(map(seen, item.attempts))) for item in items]


def fit_rungs(
    learn: Sequence[GatedItem], config: GateConfig
) -> tuple[tuple[str, ...], tuple[Rung, ...], Doubles]:
    """The signals that apply, a score with its limits per plan, and what `learn` scored with each
    document left out `[items, rungs]`, as `scores_of` gives it. Raises DataError where `learn`
    cannot give a score."""
    signals = applicable(learn, config.signals)
    if not signals:
        raise DataError(
            f"of the signals {', '.join(config.signals)} none gave a number for these requests on "
            "every rung; give other signals or a longer tail (leverage: an asset that carries its "
            "factor; fit it again)"
        )
    learn, columns = whole(learn, signals), columns_of(signals)
    rungs = []
    left_out = np.full((len(learn), len(config.plans)), np.inf)
    for number, plan in enumerate(config.plans):
        rows, damaged, at = matrix(learn, number, columns)
        documents = [learn[i].document for i in at]
        score, left_out[at, number] = fit_score(columns, rows, damaged, documents)
        rungs.append(Rung(plan, score, limits_of(learn, number, signals)))
    # What the fitted rungs refuse whatever the threshold stays refused; elsewhere a request is
    # judged by the score that never saw its document, for its own score flatters it.
    reached = np.isfinite(scores_of(learn, rungs))
    return signals, tuple(rungs), np.where(reached, left_out, np.inf)


def thresholds_of(score: Doubles) -> list[float]:
    """STEPS thresholds, ascending, at equal steps of coverage of `score` `[items]`."""
    finite = score[np.isfinite(score)]
    if not len(finite):
        return []
    # Eight digits, as a calibration stores them: what is tested is what will be compared with.
    return sorted({float(f"{np.quantile(finite, (i + 1) / STEPS):.8g}") for i in range(STEPS)})


def stop_of(
    items: Sequence[GatedItem], scores: Doubles, share: float, alpha: float, delta: float
) -> float:
    """The score at which the ladder stops climbing: the last threshold at which the risk of taking
    the first rung at or below it stays under α on `items`, had they been `share` times as many;
    with one rung 1, where nothing is left to climb.

    `items` must share no document with those that thresholds are tested on: which rung a request
    ends on is then settled before the test, for both levels alike.
    """
    if scores.shape[1] == 1:
        return 1.0
    grid = [t for t in thresholds_of(scores.ravel()) if t < 1]
    if not grid:
        return 0.0
    counts = []
    for threshold in grid:
        # Routed anew for each: where the ladder stops decides on which rung a request is counted.
        counts += counts_at(*routed(items, scores, threshold), [threshold])
    first = start_at(counts, share, alpha)
    scaled = [(t, round(share * n), round(share * k)) for t, n, k in counts[first:]]
    passed = fixed_sequence(scaled, alpha, delta)
    return grid[first] if passed is None else passed.threshold


def hold(
    before: Sequence[tuple[float, int, int]],
    counts: Sequence[tuple[float, int, int]],
    share: float,
    alpha: float,
    delta: float,
) -> Tested | None:
    """The last threshold that holds on `counts`; the sequence begins where `before`, of other
    documents, promises most. `share`: how many times as many requests `counts` are of."""
    return fixed_sequence(counts[start_at(before, share, alpha) :], alpha, delta)


def levels_of(
    learn: Sequence[GatedItem],
    learn_scores: Doubles,
    test: Sequence[GatedItem],
    test_scores: Doubles,
    config: GateConfig,
) -> tuple[float, Tested | None, Tested | None]:
    """(stop, strict, lenient): where the ladder stops and the order of thresholds from `learn`,
    what holds from `test`; scores `[items, rungs]`."""
    share = len(test) / max(1, len(learn))
    stop = stop_of(learn, learn_scores, share, config.lenient_alpha, config.delta)
    score, damaged = routed(learn, learn_scores, stop)
    # Nothing above `stop` is ever accepted, so a threshold there promises no more than one at it.
    thresholds = sorted({min(t, stop) for t in thresholds_of(score)})
    before = counts_at(score, damaged, thresholds)
    counts = counts_at(*routed(test, test_scores, stop), thresholds)
    strict = hold(before, counts, share, config.alpha, config.delta)
    lenient = hold(before, counts, share, config.lenient_alpha, config.delta)
    return stop, strict, lenient


def fit_levels(learn: Sequence[GatedItem], test: Sequence[GatedItem], config: GateConfig) -> Levels:
    """Score, limits, stop and the order of thresholds from `learn`; thresholds that hold from
    `test`, which shares no document with it. Raises DataError where `learn` cannot give a score."""
    signals, rungs, learn_scores = fit_rungs(learn, config)
    learn, test = whole(learn, signals), whole(test, signals)
    test_scores = scores_of(test, rungs)
    stop, strict, lenient = levels_of(learn, learn_scores, test, test_scores, config)
    conformal = _conformal(test, test_scores[:, 0], config.alpha) if len(rungs) == 1 else None
    return Levels(rungs, signals, stop, strict, lenient, conformal)


def _conformal(test: Sequence[GatedItem], scores: Doubles, alpha: float) -> float | None:
    """The threshold of conformal risk control for one rung's scores `[items]`; None where there is
    none."""
    if not len(test):
        return None
    reached = np.isfinite(scores)
    bad = np.array([item.attempts[0].damaged for item in test]) & reached
    # 2 is above any probability: a request that is refused whatever the threshold counts among the
    # items, never as accepted.
    threshold = conformal_threshold(np.where(reached, scores, 2.0), bad, alpha)
    return None if threshold is None else min(threshold, 1.0)


def report_of(items: Sequence[GatedItem], levels: Levels) -> dict[str, Any]:
    """Figures of the report part: nothing in it chose anything. `strict` and `lenient`: of all
    requests at or below that threshold; `approximate`: of those tagged `use_approximate` alone, for
    which nothing is promised."""
    if not items:
        return {"items": 0}
    score, bad = routed(items, scores_of(items, levels.rungs), levels.stop)
    strict, lenient = _at_most(levels.strict, score), _at_most(levels.lenient, score)
    rows, damaged, at = matrix(items, 0, list(levels.rungs[0].score.columns))
    table = table_of(as_columns(items, 0), damaged)
    combined = auroc(levels.rungs[0].score.of(rows), damaged) if at else None
    costs = []
    for item in items:
        if item.prefill and item.attempts[0].columns is not None:
            costs.append(item.attempts[0].flops / item.prefill)
    lenient_holds = levels.lenient is not None
    return {
        "items": len(items),
        "damaged": int(sum(item.attempts[0].damaged for item in items)),
        "strict": None if levels.strict is None else _realised(strict, bad),
        "lenient": _realised(lenient, bad) if lenient_holds else None,
        "approximate": _realised(lenient & ~strict, bad) if lenient_holds else None,
        "auroc": {name: round(value, 4) for name, value in sorted(table.items())},
        "auroc_score": None if combined is None else round(combined, 4),
        "cost_share": round(float(np.mean(costs)), 4) if costs else None,
    }


def _at_most(level: Tested | None, score: Doubles) -> NDArray[np.bool_]:
    return np.zeros(len(score), bool) if level is None else score <= level.threshold


def _realised(inside: NDArray[np.bool_], damaged: NDArray[np.bool_]) -> dict[str, Any]:
    n, k = int(inside.sum()), int(damaged[inside].sum())
    return {
        "coverage": round(n / len(inside), 6),
        "accepted": n,
        "damaged": k,
        "risk_ci": list(interval(k, n)) if n else None,
    }
