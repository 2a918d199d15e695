"""How often a calibration's guarantee is broken, and at which coverage: recalibrations from a pool
that is known exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gates.lines import config_of, documents_split
from kvbridge.errors import DataError
from kvbridge.gates.calibrate.items import GatedItem, counts_at, routed, scores_of
from kvbridge.gates.calibrate.levels import fit_rungs, hold, thresholds_of, whole
from kvbridge.gates.decide.guarantee import conformal_threshold, interval

LEVELS = ((0.02, 0.05), (0.05, 0.05), (0.1, 0.05), (0.2, 0.05))
SPLITS, DRAWS = 10, 30
Runs = dict[str, list[tuple[float, float]]]
"""How samples were drawn → (coverage, risk) of each."""


def recalibrations(items: Sequence[GatedItem], label: str) -> dict[str, Any]:
    """Coverage and realised violations per (α, δ), over SPLITS scores × DRAWS calibration samples
    each.

    A third of the documents fits the score; the others are the population, known exactly.
    Calibration samples of half its size are drawn from it with replacement: by request, as the
    theorem wants, and by document.
    """
    runs: dict[tuple[float, float], Runs] = {
        level: {"request": [], "document": []} for level in LEVELS
    }
    conformal: list[float] = []
    for split in range(SPLITS):
        learn, population = documents_split(items, 1 / 3, split)
        try:
            signals, rungs, learn_scores = fit_rungs(learn, config_of(label))
        except DataError:
            continue
        learn, population = whole(learn, signals), whole(population, signals)
        scores = scores_of(population, rungs)[:, 0]
        thresholds = thresholds_of(learn_scores[:, 0])
        before = counts_at(*routed(learn, learn_scores, 1.0), thresholds)
        damaged = np.array([item.attempts[0].damaged for item in population])
        size = len(population) // 2
        rng = np.random.default_rng(1000 + split)
        for drawn in draws(population, size, rng):
            for how, at in drawn.items():
                counts = counts_at(scores[at], damaged[at], thresholds)
                for alpha, delta in LEVELS:
                    level = hold(before, counts, size / len(learn), alpha, delta)
                    runs[alpha, delta][how].append(realised(level, scores, damaged))
            conformal.append(_conformal_risk(scores, damaged, drawn["request"]))
    body: dict[str, Any] = {}
    for (alpha, delta), by_way in runs.items():
        body[f"{alpha:g}/{delta:g}"] = {how: summary(x, alpha) for how, x in by_way.items()}
    body["conformal_0.05"] = float(np.mean(conformal)) if conformal else None
    return body


def draws(
    population: Sequence[GatedItem], size: int, rng: np.random.Generator
) -> Iterator[dict[str, NDArray[np.int64]]]:
    """DRAWS samples of `size` places in the population, with replacement: single requests, and
    documents with all of their requests."""
    groups: dict[str, list[int]] = {}
    for place, item in enumerate(population):
        groups.setdefault(item.document, []).append(place)
    members = [np.array(places) for places in groups.values()]
    for _ in range(DRAWS):
        requests = rng.integers(0, len(population), size)
        documents = rng.integers(0, len(members), len(members))
        by_document = np.concatenate([members[document] for document in documents])
        yield {"request": requests, "document": by_document[:size]}


def _conformal_risk(
    scores: NDArray[np.float64], damaged: NDArray[np.bool_], drawn: NDArray[np.int64]
) -> float:
    """P(accepted and damaged) over the population, at the threshold of conformal risk control for
    5 % that a sample gives."""
    reached = np.isfinite(scores[drawn])
    # 2 is above any probability: what the gate is not reached for is never accepted.
    sampled = np.where(reached, scores[drawn], 2.0)
    limit = conformal_threshold(sampled, damaged[drawn] & reached, 0.05)
    return 0.0 if limit is None else float((damaged & (scores <= limit)).mean())


def realised(
    level: Any, scores: NDArray[np.float64], damaged: NDArray[np.bool_]
) -> tuple[float, float]:
    """(coverage, risk) over the population; (0, 0) where nothing holds."""
    if level is None:
        return 0.0, 0.0
    inside = scores <= level.threshold
    return float(inside.mean()), float(damaged[inside].mean()) if inside.any() else 0.0


def summary(runs: Sequence[tuple[float, float]], alpha: float) -> dict[str, Any]:
    """How often the guarantee was broken, and the coverage."""
    if not runs:
        return {"n": 0}
    coverage, risk = np.array(runs).T
    broken = int((risk > alpha).sum())
    return {
        "n": len(runs),
        "calibrated": float((coverage > 0).mean()),
        "coverage": float(coverage.mean()),
        "coverage_10_90": [float(x) for x in np.quantile(coverage, (0.1, 0.9))],
        "violations": broken,
        "violation_ci": list(interval(broken, len(runs))),
        "mean_risk": float(risk[coverage > 0].mean()) if (coverage > 0).any() else None,
    }
