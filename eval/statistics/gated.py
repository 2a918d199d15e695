"""What a gate decided in a run, and what its score is worth, from rows; each request beside the
translation at its own tail."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvbridge.eval.conditions.names import paired
from kvbridge.eval.run.rows import Row
from kvbridge.eval.statistics.bootstrap import NotShown
from kvbridge.eval.statistics.metrics import metric_of
from kvbridge.eval.statistics.routing import call_curve, risk_coverage
from kvbridge.eval.statistics.table import Table, number


def gate_arrays(table: Table) -> tuple[list[float], list[float], list[str]] | None:
    """Per item the translated cache's loss and the gate's risk score, with the items; None without
    scored gated rows, or without the same translation (at the tail that the request ended on) run
    ungated.

    A request that the gate turned away before scoring it (too short, say) counts as the riskiest of
    all. The loss is an answer lost (native right, translated wrong) or, without answers, KL(native
    ‖ translated) in nats.
    """
    gated, ungated = table.cells.get("gated", {}), paired("translated", table.tails("gated"))
    scored = [row.score for row in gated.values() if row.score is not None]
    if not scored:
        return None
    items, damage = metric_of(table).damage(table, ungated, gated)
    if not items:
        return None
    riskiest = math.nextafter(max(scored), math.inf)
    given = (gated[item].score for item in items)
    scores = [riskiest if score is None else score for score in given]
    return damage.tolist(), scores, items


def gate(table: Table) -> dict[str, Any] | None:
    """What the gate decided and why, and what its score is worth where it gave any: AURC, and
    RouteLLM's APGR and CPT with prefill as the strong model. None without gated rows."""
    decided = [row for row in table.cells.get("gated", {}).values() if row.verdict]
    if not decided:
        return None
    result: dict[str, Any] = {
        "n": len(decided),
        "aurc": None,
        "excess_aurc": None,
        "verdicts": dict(sorted(Counter(row.verdict for row in decided if row.verdict).items())),
        "reasons": dict(sorted(Counter(row.reason for row in decided if row.reason).items())),
        "apgr": None,
        "cpt_50": None,
        "cpt_80": None,
        "tails": _ended(decided),
    }
    if (arrays := gate_arrays(table)) is None:
        return result
    lost, score, items = arrays
    curve = risk_coverage(lost, score)
    result |= {"n": len(items), "aurc": number(curve.aurc), "excess_aurc": number(curve.excess)}
    if metric_of(table).column == "correct":
        ungated = paired("translated", table.tails("gated"))
        weak, strong = (table.column(name, "correct", items) for name in (ungated, "native"))
        calls = call_curve(weak, strong, score)
        shares = {"apgr": calls.apgr(), "cpt_50": calls.cpt(0.5), "cpt_80": calls.cpt(0.8)}
        for key, value in shares.items():
            result[key] = None if isinstance(value, NotShown) else number(value)
    return result


def _ended(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Per tail how many requests ended there and how many of them were accepted; rows of older runs
    do not say."""
    ended: dict[int, list[Row]] = {}
    for row in rows:
        if row.tail is not None:
            ended.setdefault(row.tail, []).append(row)
    return {
        str(tail): {"n": len(some), "accepted": sum(row.verdict != "discard" for row in some)}
        for tail, some in sorted(ended.items())
    }
