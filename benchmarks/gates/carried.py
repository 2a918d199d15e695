"""A calibration used where it was not made: on longer prompts, and on other kinds of text."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.gates.lines import Pool, config_of, documents_split
from kvbridge.errors import DataError
from kvbridge.gates.calibrate.items import GatedItem, counts_at, routed, scores_of
from kvbridge.gates.calibrate.levels import fit_rungs, hold, thresholds_of, whole
from kvbridge.gates.decide.guarantee import interval

Items = list[GatedItem]


def carried(
    pool: Pool, label: str, tau: float | None, alpha: float, delta: float
) -> dict[str, Any]:
    """Way from one domain to another → realised risk and coverage of a calibration made in the
    first."""
    ways = _ways(pool, label, tau)
    return {name: _used(home, away, label, alpha, delta) for name, (home, away) in ways.items()}


def _ways(pool: Pool, label: str, tau: float | None) -> dict[str, tuple[Items, Items]]:
    """Requests of the domain where a calibration is made, and of the one where it is used."""
    home_kind, *others = pool.kinds
    home = pool.items(label, tau, (home_kind,))
    lengths = [item.tokens for item in home] or [0]
    low, high = (int(tokens) for tokens in np.quantile(lengths, (0.4, 0.7)))
    short = [item for item in home if item.tokens <= low]
    long = [item for item in home if item.tokens > high]
    ways = {f"prompts ≤ {low} tokens → prompts > {high} tokens": (short, long)}
    for kind in others:
        ways[f"{home_kind} → {kind}"] = (home, pool.items(label, tau, (kind,)))
    return ways


def _used(home: Items, away: Items, label: str, alpha: float, delta: float) -> dict[str, Any]:
    """Half of the home documents fit a score, the others set its threshold, which is then used on
    documents of `away` that fitted nothing."""
    learn, test = documents_split(home, 0.5, 3)
    learnt = {item.document for item in learn}
    away = [item for item in away if item.document not in learnt]
    try:
        signals, rungs, learn_scores = fit_rungs(learn, config_of(label))
    except DataError as error:
        return {"why": str(error)}
    learn, test, away = (whole(items, signals) for items in (learn, test, away))
    thresholds = thresholds_of(learn_scores[:, 0])
    before = counts_at(*routed(learn, learn_scores, 1.0), thresholds)
    counts = counts_at(*routed(test, scores_of(test, rungs), 1.0), thresholds)
    level = hold(before, counts, len(test) / len(learn), alpha, delta)
    damaged = np.array([item.attempts[0].damaged for item in away])
    body: dict[str, Any] = {
        "base_risk": float(damaged.mean()) if away else None,
        "away": len(away),
    }
    if level is not None:
        inside = scores_of(away, rungs)[:, 0] <= level.threshold
        accepted, failures = int(inside.sum()), int(damaged[inside].sum())
        body["accepted"], body["damaged"] = accepted, failures
        body["risk_ci"] = list(interval(failures, accepted)) if accepted else None
    body["held"] = level is not None
    return body
