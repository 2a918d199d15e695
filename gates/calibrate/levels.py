"""Scores, limits and thresholds from calibration requests, and the figures of a part that chose nothing. No model runs."""

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
    Floats,
    Item,
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
from kvbridge.gates.signals import SIGNALS, parts_of

STEPS = 40


@dataclass(frozen=True)
class Levels:
    """What items gave: rungs, the score at which the ladder stops, both levels, the conformal threshold."""

    rungs: tuple[Rung, ...]
    signals: tuple[str, ...]
    stop: float
    strict: Tested | None
    lenient: Tested | None
    conformal: float | None


def applicable(items: Sequence[Item], signals: Sequence[str]) -> tuple[str, ...]:
    """Signals that gave finite numbers for nearly every request on every rung (the rest is dropped by name)."""
    found = []
    for name in signals:
        values = [
            [item.attempts[r].columns[c] for c in SIGNALS[name].columns]  # type: ignore[index]
            for item in items
            for r in range(len(item.attempts))
            if item.attempts[r].columns is not None
        ]
        if values and float(np.isfinite(np.array(values)).all(1).mean()) > 0.99:
            found.append(name)
    return tuple(found)


def whole(items: Sequence[Item], signals: Sequence[str]) -> list[Item]:
    """The same items as a gate of `signals` sees and pays for them: an attempt with a number missing counts as refused, and
    parts of the work that none of these signals needs cost nothing."""
    columns, parts = [c for s in signals for c in SIGNALS[s].columns], parts_of(signals)
    return [
        Item(
            i.id,
            i.document,
            i.tokens,
            tuple(
                a
                if a.columns is not None and all(math.isfinite(a.columns[c]) for c in columns)
                else replace(a, columns=None)
                for a in (tried.paying(parts) for tried in i.attempts)
            ),
            i.prefill,
        )
        for i in items
    ]


def fit_rungs(
    learn: Sequence[Item], config: GateConfig
) -> tuple[tuple[str, ...], tuple[Rung, ...], Floats]:
    """The signals that apply, a score with its limits per plan, and what `learn` scored with each document left out
    `[items, rungs]`, as `scores_of` gives it. Raises DataError where `learn` cannot give a score."""
    signals = applicable(learn, config.signals)
    if not signals:
        raise DataError(
            f"of the signals {', '.join(config.signals)} none gave a number for these requests on every rung; give other "
            "signals or a longer tail (leverage: an asset that carries its factor; fit it again)"
        )
    learn = whole(learn, signals)
    columns = [c for s in signals for c in SIGNALS[s].columns]
    rungs = []
    left_out = np.full((len(learn), len(config.plans)), np.inf)
    for number, plan in enumerate(config.plans):
        rows, damaged, at = matrix(learn, number, columns)
        score, left_out[at, number] = fit_score(
            columns, rows, damaged, [learn[i].document for i in at]
        )
        rungs.append(Rung(plan, score, limits_of(learn, number, signals)))
    return signals, tuple(rungs), np.where(np.isfinite(scores_of(learn, rungs)), left_out, np.inf)


def thresholds_of(score: Floats) -> list[float]:
    """STEPS thresholds, ascending, at equal steps of coverage of `score` `[items]`."""
    finite = score[np.isfinite(score)]
    return (
        sorted({float(f"{np.quantile(finite, (i + 1) / STEPS):.8g}") for i in range(STEPS)})
        if len(finite)
        else []
    )


def stop_of(
    items: Sequence[Item], scores: Floats, share: float, alpha: float, delta: float
) -> float:
    """The score at which the ladder stops climbing: the last threshold at which the risk of taking the first rung at or
    below it stays under α on `items`, had they been `share` times as many; with one rung 1, where nothing is left to climb.

    `items` must share no document with those that thresholds are tested on: which rung a request ends on is then settled
    before the test, for both levels alike.
    """
    if scores.shape[1] == 1:
        return 1.0
    grid = [t for t in thresholds_of(scores.ravel()) if t < 1]
    if not grid:
        return 0.0
    counts = [c for t in grid for c in counts_at(*routed(items, scores, t), [t])]
    first = start_at(counts, share, alpha)
    scaled = [(t, round(share * n), round(share * k)) for t, n, k in counts[first:]]
    found = fixed_sequence(scaled, alpha, delta)
    return grid[first] if found is None else found.threshold


def hold(
    before: Sequence[tuple[float, int, int]],
    counts: Sequence[tuple[float, int, int]],
    share: float,
    alpha: float,
    delta: float,
) -> Tested | None:
    """The last threshold that holds on `counts`; the sequence begins where `before`, of other documents, promises most.
    `share`: how many times as many requests `counts` are of."""
    return fixed_sequence(counts[start_at(before, share, alpha) :], alpha, delta)


def levels_of(
    learn: Sequence[Item], ours: Floats, test: Sequence[Item], theirs: Floats, config: GateConfig
) -> tuple[float, Tested | None, Tested | None]:
    """(stop, strict, lenient): where the ladder stops and the order of thresholds from `learn` with scores `ours`, what
    holds from `test` with scores `theirs`."""
    share = len(test) / max(1, len(learn))
    stop = stop_of(learn, ours, share, config.lenient_alpha, config.delta)
    score, damaged = routed(learn, ours, stop)
    thresholds = sorted({min(t, stop) for t in thresholds_of(score)})
    before, counts = (
        counts_at(score, damaged, thresholds),
        counts_at(*routed(test, theirs, stop), thresholds),
    )
    strict, lenient = (
        hold(before, counts, share, alpha, config.delta)
        for alpha in (config.alpha, config.lenient_alpha)
    )
    return stop, strict, lenient


def fit_levels(learn: Sequence[Item], test: Sequence[Item], config: GateConfig) -> Levels:
    """Score, limits, stop and the order of thresholds from `learn`; thresholds that hold from `test`, which shares no document
    with it. Raises DataError where `learn` cannot give a score."""
    signals, rungs, ours = fit_rungs(learn, config)
    learn, test = whole(learn, signals), whole(test, signals)
    theirs = scores_of(test, rungs)
    stop, strict, lenient = levels_of(learn, ours, test, theirs, config)
    conformal = None
    if len(rungs) == 1 and len(test):
        fine = np.isfinite(theirs[:, 0])
        bad = np.array([item.attempts[0].damaged for item in test]) & fine
        found = conformal_threshold(np.where(fine, theirs[:, 0], 2.0), bad, config.alpha)
        conformal = None if found is None else min(found, 1.0)
    return Levels(rungs, signals, stop, strict, lenient, conformal)


def report_of(items: Sequence[Item], levels: Levels) -> dict[str, Any]:
    """Figures of the report part: nothing in it chose anything. `strict` and `lenient`: of all requests at or below that
    threshold; `approximate`: of those tagged `use_approximate` alone, for which nothing is promised."""
    if not items:
        return {"items": 0}
    score, bad = routed(items, scores_of(items, levels.rungs), levels.stop)
    rows, damaged, at = matrix(items, 0, list(levels.rungs[0].score.columns))
    found: dict[str, Any] = {
        "items": len(items),
        "damaged": int(sum(i.attempts[0].damaged for i in items)),
    }
    at_most = {
        name: np.zeros(len(items), bool) if level is None else score <= level.threshold
        for name, level in (("strict", levels.strict), ("lenient", levels.lenient))
    }
    found["strict"] = None if levels.strict is None else _realised(at_most["strict"], bad)
    found["lenient"] = None if levels.lenient is None else _realised(at_most["lenient"], bad)
    found["approximate"] = (
        None if levels.lenient is None else _realised(at_most["lenient"] & ~at_most["strict"], bad)
    )
    found["auroc"] = {
        n: round(v, 4) for n, v in sorted(table_of(as_columns(items, 0), damaged).items())
    }
    combined = auroc(levels.rungs[0].score.of(rows), damaged) if at else None
    found["auroc_score"] = None if combined is None else round(combined, 4)
    costs = [
        i.attempts[0].flops / i.prefill
        for i in items
        if i.prefill and i.attempts[0].columns is not None
    ]
    found["cost_share"] = round(float(np.mean(costs)), 4) if costs else None
    return found


def _realised(inside: NDArray[np.bool_], damaged: NDArray[np.bool_]) -> dict[str, Any]:
    n, k = int(inside.sum()), int(damaged[inside].sum())
    return {
        "coverage": round(n / len(inside), 6),
        "accepted": n,
        "damaged": k,
        "risk_ci": list(interval(k, n)) if n else None,
    }
