"""One rung against two: what a second, longer repair lets through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gates.lines import Pool, damage, documents_split, gate_flops
from benchmarks.gates.pool import PLAN, RUNG
from kvbridge.errors import DataError
from kvbridge.gates.calibrate.config import GateConfig
from kvbridge.gates.calibrate.items import Attempt, GatedItem, counts_at, routed, scores_of
from kvbridge.gates.calibrate.levels import fit_rungs, stop_of, thresholds_of, whole
from kvbridge.handoff.cost import prefill_flops

RISKS = (0.05, 0.1, 0.2)
WIDTHS = {"one rung": 1, "two rungs": 2}


def ladder(pool: Pool, label: str, tau: float | None) -> dict[str, Any]:
    """Coverage at a risk with one rung and with two, on the requests that were tried with both,
    routed as a `Ladder` does with a stop from the documents of the score; and how often the second
    rung would still have been cheaper than a prefill."""
    items, affordable = _tried_twice(pool, label, tau)
    learn, rest = documents_split(items, 0.5, 11)
    body: dict[str, Any] = {
        "n": len(rest),
        "second_rung_affordable": float(np.mean(affordable)) if items else None,
    }
    try:
        signals, rungs, learn_scores = fit_rungs(learn, GateConfig(label=label, plans=(PLAN, RUNG)))
    except DataError as error:
        return {**body, "why": str(error)}
    learn, rest = whole(learn, signals), whole(rest, signals)
    scores = scores_of(rest, rungs)
    for name, width in WIDTHS.items():
        for risk in RISKS:
            share = len(rest) / len(learn)
            stop = stop_of(learn, learn_scores[:, :width], share, risk, 0.05)
            accepted = _most_accepted(rest, scores[:, :width], stop, risk)
            body[f"{name} at risk {risk:g}"] = accepted / max(1, len(rest))
    return body


def _tried_twice(pool: Pool, label: str, tau: float | None) -> tuple[list[GatedItem], list[bool]]:
    """Requests with an attempt per rung, and whether both together cost less than a prefill."""
    second = {row["id"]: row for row in pool.cases.get("rung", [])}
    items, affordable = [], []
    for row in pool.cases["right"]:
        other = second.get(row["id"])
        if other is None or "signals" not in row:
            continue
        attempts = (_attempt(row, label, tau), _attempt(other, label, tau))
        items.append(GatedItem(row["id"], row["document"], row["tokens"], attempts))
        spent = row["handoff_flops"] + gate_flops(row)
        affordable.append(2 * spent < prefill_flops(pool.receiver, row["tokens"]))
    return items, affordable


def _attempt(row: dict[str, Any], label: str, tau: float | None) -> Attempt:
    reached = "signals" in row
    return Attempt(row.get("signals"), reached and bool(damage(row, label, tau)))


def _most_accepted(
    items: Sequence[GatedItem], scores: NDArray[np.float64], stop: float, risk: float
) -> int:
    """The most requests below one threshold of which no more than a share `risk` is damaged."""
    score, damaged = routed(items, scores, stop)
    most = 0
    for _, accepted, failures in counts_at(score, damaged, thresholds_of(score)):
        if accepted and failures / accepted <= risk:
            most = max(most, accepted)
    return most
