"""What tells damaged requests from others: single columns, the gate's score, and simpler orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gates.lines import SENDER_SIDE, config_of, documents_split
from kvbridge.errors import DataError
from kvbridge.eval.statistics.routing import risk_coverage
from kvbridge.gates.calibrate.evaluate import auroc, detection
from kvbridge.gates.calibrate.items import GatedItem
from kvbridge.gates.calibrate.levels import fit_rungs, whole
from kvbridge.gates.decide.guarantee import interval
from kvbridge.gates.signals import DEFAULT_SIGNALS, SIGNALS

COVERAGES = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
FALSE_ALARMS = (0.01, 0.05, 0.1)
OTHER_SCORES = {
    "score_without_sender": tuple(s for s in DEFAULT_SIGNALS if s not in SENDER_SIDE),
    "score_of_all": tuple(SIGNALS),
}
"""Scores beside that of the default signals → the signals they are made of."""
Values = NDArray[np.float64]


def separation(items: Sequence[GatedItem], label: str) -> dict[str, Any]:
    """AUROC per column; of the default signals' score on documents that did not fit it, and AURC
    beside baselines; AUROC of a score without the sender's and of one of all signals."""
    learn, rest = documents_split(items, 0.5, 99)
    damaged = np.array([item.attempts[0].damaged for item in rest])
    columns = _columns(rest)
    body: dict[str, Any] = {"n": len(rest), "damaged": float(damaged.mean())}
    body["columns"] = {c: _auroc_where_given(v, damaged) for c, v in columns.items()}
    try:
        score = _scored(learn, rest, label, DEFAULT_SIGNALS)
    except DataError as error:
        return {**body, "score": None, "why": str(error)}
    body["score"] = auroc(score, damaged)
    for name, signals in OTHER_SCORES.items():
        body[name] = auroc(_scored(learn, rest, label, signals), damaged)
    body["aurc"] = _aurc(score, columns, damaged)
    body["risk_at_coverage"] = _risk_at_coverage(score, damaged)
    body["detection"] = {}
    for rate in FALSE_ALARMS:
        told = detection(score[~damaged], score[damaged], rate) if damaged.any() else None
        body["detection"][f"{rate:g}"] = told
    return body


def _columns(items: Sequence[GatedItem]) -> dict[str, list[float]]:
    """Every signal's columns, one value per request."""
    names = [column for signal in SIGNALS.values() for column in signal.columns]
    return {name: [(i.attempts[0].columns or {})[name] for i in items] for name in names}


def _scored(
    learn: Sequence[GatedItem], rest: Sequence[GatedItem], label: str, signals: Sequence[str]
) -> Values:
    """Scores of `rest` by what was fitted on `learn`; 1, the worst, where the gate was not reached.
    Raises DataError where `learn` cannot give a score."""
    used, rungs, _ = fit_rungs(learn, config_of(label, signals))
    scores = []
    for item in whole(rest, used):
        columns = item.attempts[0].columns
        scores.append(rungs[0].score(columns) if columns else 1.0)
    return np.array(scores)


def _auroc_where_given(values: Sequence[float], damaged: NDArray[np.bool_]) -> float | None:
    """AUROC over the requests that a column says something about."""
    numbers = np.asarray(values, dtype=np.float64)
    given = ~np.isnan(numbers)
    return auroc(numbers[given], damaged[given])


def _aurc(
    score: Values, columns: dict[str, list[float]], damaged: NDArray[np.bool_]
) -> dict[str, float]:
    """Area under the curve of risk over coverage: the score's order, simpler ones, and the best
    there is."""
    losses = damaged.astype(float)
    rng = np.random.default_rng(0)
    return {
        "score": risk_coverage(losses, score).aurc,
        "always (random order)": float(losses.mean()),
        "random, one draw": risk_coverage(losses, rng.random(len(losses))).aurc,
        "length": risk_coverage(losses, columns["length"]).aurc,
        "sender entropy": risk_coverage(losses, columns["sender_entropy"]).aurc,
        "oracle": risk_coverage(losses, losses).aurc,
    }


def _risk_at_coverage(score: Values, damaged: NDArray[np.bool_]) -> dict[str, list[float]]:
    """Coverage → the risk among so many best scores, and its 95 % interval."""
    order = np.argsort(score)
    curve = {}
    for share in COVERAGES:
        accepted = max(1, round(share * len(order)))
        failures = int(damaged[order[:accepted]].sum())
        curve[f"{share:g}"] = [failures / accepted, *interval(failures, accepted)]
    return curve
