"""Scores, limits and thresholds from calibration requests, and the figures of a part that chose nothing. No model runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbridge.errors import DataError
from kvbridge.gates.config import GateConfig
from kvbridge.gates.evaluate import auroc, table_of
from kvbridge.gates.guarantee import Tested, conformal_threshold, fixed_sequence, interval, start_at
from kvbridge.gates.items import (
    Attempt,
    Floats,
    Item,
    as_columns,
    counts_at,
    limits_of,
    matrix,
    outcome_at,
    scores_of,
)
from kvbridge.gates.score import fit_score
from kvbridge.gates.sealed import Rung
from kvbridge.gates.signals import SIGNALS

STEPS = 40


@dataclass(frozen=True)
class Levels:
    """What items gave: rungs, both levels, the conformal threshold."""

    rungs: tuple[Rung, ...]
    signals: tuple[str, ...]
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
    """The same items; an attempt with a number missing counts as refused, as it would be at run time."""
    columns = [c for s in signals for c in SIGNALS[s].columns]
    return [
        Item(
            i.id, i.document, i.tokens,
            tuple(
                a if a.columns is not None and all(math.isfinite(a.columns[c]) for c in columns)
                else Attempt(None, a.damaged, a.flops)
                for a in i.attempts
            ),
            i.prefill,
        )
        for i in items
    ]  # fmt: skip


def fit_rungs(learn: Sequence[Item], config: GateConfig) -> tuple[tuple[str, ...], tuple[Rung, ...], Floats]:
    """The signals that apply, a score with its limits per plan, and what `learn` scored with each document left out
    `[items, rungs]`, as `scores_of` gives it. Raises DataError where `learn` cannot give a score."""
    signals = applicable(learn, config.signals)
    if not signals:
        raise DataError("no signal applies to these requests; give another repair plan")
    learn = whole(learn, signals)
    columns = [c for s in signals for c in SIGNALS[s].columns]
    rungs = []
    left_out = np.full((len(learn), len(config.plans)), np.inf)
    for number, plan in enumerate(config.plans):
        rows, damaged, at = matrix(learn, number, columns)
        score, left_out[at, number] = fit_score(columns, rows, damaged, [learn[i].document for i in at])
        rungs.append(Rung(plan, score, limits_of(learn, number, signals)))
    return signals, tuple(rungs), np.where(np.isfinite(scores_of(learn, rungs)), left_out, np.inf)


def thresholds_of(scores: Floats) -> list[float]:
    """STEPS thresholds, ascending, at equal steps of coverage of `scores` `[items, rungs]`."""
    best = scores.min(1)
    finite = best[np.isfinite(best)]
    return sorted({float(f"{np.quantile(finite, (i + 1) / STEPS):.8g}") for i in range(STEPS)}) if len(finite) else []


def hold(
    before: Sequence[tuple[float, int, int]], counts: Sequence[tuple[float, int, int]], share: float, alpha: float,
    delta: float,
) -> Tested | None:  # fmt: skip
    """The last threshold that holds on `counts`; the sequence begins where `before`, of other documents, promises most.
    `share`: how many times as many requests `counts` are of."""
    return fixed_sequence(counts[start_at(before, share, alpha) :], alpha, delta)


def fit_levels(learn: Sequence[Item], test: Sequence[Item], config: GateConfig) -> Levels:
    """Score, limits and the order of thresholds from `learn`; thresholds that hold from `test`, which shares no document
    with it. Raises DataError where `learn` cannot give a score."""
    signals, rungs, ours = fit_rungs(learn, config)
    learn, test = whole(learn, signals), whole(test, signals)
    theirs = scores_of(test, rungs)
    thresholds = thresholds_of(ours)
    before, counts = counts_at(learn, ours, thresholds), counts_at(test, theirs, thresholds)
    share = len(test) / max(1, len(learn))
    strict, lenient = (
        hold(before, counts, share, alpha, config.delta) for alpha in (config.alpha, config.lenient_alpha)
    )
    conformal = None
    if len(rungs) == 1 and len(test):
        fine = np.isfinite(theirs[:, 0])
        bad = np.array([item.attempts[0].damaged for item in test]) & fine
        found = conformal_threshold(np.where(fine, theirs[:, 0], 2.0), bad, config.alpha)
        conformal = None if found is None else min(found, 1.0)
    return Levels(rungs, signals, strict, lenient, conformal)


def report_of(items: Sequence[Item], levels: Levels) -> dict[str, Any]:
    """Figures of the third part: nothing in it chose anything."""
    if not items:
        return {"items": 0}
    scores = scores_of(items, levels.rungs)
    rows, damaged, at = matrix(items, 0, list(levels.rungs[0].score.columns))
    found: dict[str, Any] = {"items": len(items), "damaged": int(sum(i.attempts[0].damaged for i in items))}
    for name, level in (("strict", levels.strict), ("lenient", levels.lenient)):
        if level is None:
            found[name] = None
            continue
        accepted, bad = outcome_at(items, scores, level.threshold)
        n, k = int(accepted.sum()), int(bad.sum())
        found[name] = {"coverage": round(n / len(items), 6), "accepted": n, "damaged": k, "risk_ci": list(interval(k, n)) if n else None}  # fmt: skip
    found["auroc"] = {n: round(v, 4) for n, v in sorted(table_of(as_columns(items, 0), damaged).items())}
    combined = auroc(levels.rungs[0].score.of(rows), damaged) if at else None
    found["auroc_score"] = None if combined is None else round(combined, 4)
    costs = [i.attempts[0].flops / i.prefill for i in items if i.prefill and i.attempts[0].columns is not None]
    found["cost_share"] = round(float(np.mean(costs)), 4) if costs else None
    return found
