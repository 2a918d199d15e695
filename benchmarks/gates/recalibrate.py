"""How often a calibration's guarantee is broken, and at which coverage: recalibrations from a pool that is known exactly."""

from __future__ import annotations

from collections.abc import Sequence
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


def recalibrations(items: Sequence[GatedItem], label: str) -> dict[str, Any]:
    """Coverage and realised violations per (α, δ), over SPLITS scores × DRAWS calibration samples each.

    A third of the documents fits the score; the others are the population, known exactly. Calibration samples of half
    its size are drawn from it with replacement: by request, as the theorem wants, and by document.
    """
    found: dict[str, Any] = {f"{a:g}/{d:g}": {"request": [], "document": []} for a, d in LEVELS}
    conformal = []
    for split in range(SPLITS):
        learn, population = documents_split(items, 1 / 3, split)
        try:
            signals, rungs, ours = fit_rungs(learn, config_of(label))
        except DataError:
            continue
        learn, population = whole(learn, signals), whole(population, signals)
        theirs = scores_of(population, rungs)[:, 0]
        thresholds = thresholds_of(ours[:, 0])
        before = counts_at(*routed(learn, ours, 1.0), thresholds)
        damaged = np.array([i.attempts[0].damaged for i in population])
        groups: dict[str, list[int]] = {}
        for place, item in enumerate(population):
            groups.setdefault(item.document, []).append(place)
        members = [np.array(g) for g in groups.values()]
        size = len(population) // 2
        rng = np.random.default_rng(1000 + split)
        for _ in range(DRAWS):
            drawn = {"request": rng.integers(0, len(population), size)}
            chosen = np.concatenate(
                [members[i] for i in rng.integers(0, len(members), len(members))]
            )
            drawn["document"] = chosen[:size]
            for how, at in drawn.items():
                counts = counts_at(theirs[at], damaged[at], thresholds)
                for alpha, delta in LEVELS:
                    level = hold(before, counts, size / len(learn), alpha, delta)
                    found[f"{alpha:g}/{delta:g}"][how].append(realised(level, theirs, damaged))
            at = drawn["request"]
            fine = np.isfinite(theirs[at])
            limit = conformal_threshold(np.where(fine, theirs[at], 2.0), damaged[at] & fine, 0.05)
            conformal.append(0.0 if limit is None else float((damaged & (theirs <= limit)).mean()))
    return {
        **{
            k: {h: summary(v, float(k.split("/")[0])) for h, v in x.items()}
            for k, x in found.items()
        },
        "conformal_0.05": float(np.mean(conformal)) if conformal else None,
    }


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
