"""What a gate decided in a run, and what its score is worth, from rows; each request beside the translation at its own tail."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvbridge.eval.conditions.plans import paired
from kvbridge.eval.run.rows import Row
from kvbridge.eval.statistics.figures import Refused
from kvbridge.eval.statistics.routing import call_curve, risk_coverage
from kvbridge.eval.statistics.table import Table, number
from kvbridge.eval.statistics.verdict import metric_of


def gate_arrays(table: Table) -> tuple[list[float], list[float], list[str]] | None:
    """Per item the translated cache's loss and the gate's risk score, with the items; None without scored
    gated rows, or without the same translation (at the tail that the request ended on) run ungated.

    A request that the gate turned away before scoring it (too short, say) counts as the riskiest of all. The loss is an
    answer lost (native right, translated wrong) or, without answers, KL(native ‖ translated)
    in nats.
    """
    gated, ungated = table.cells.get("gated", {}), paired("translated", table.tails("gated"))
    if all(row.score is None for row in gated.values()):
        return None
    field = "correct" if metric_of(table) == "correct" else "kl"
    others = [ungated, "native"] if field == "correct" else [ungated]
    items = [item for item in table.items(others, field) if item in gated]
    if not items:
        return None
    value = table.column(ungated, field, items)
    lost = table.column("native", field, items) * (1 - value) if field == "correct" else value
    last = math.nextafter(
        max(row.score for row in gated.values() if row.score is not None), math.inf
    )
    scores = [last if (score := gated[item].score) is None else score for item in items]
    return lost.tolist(), scores, items


def gate(table: Table) -> dict[str, Any] | None:
    """What the gate decided and why, and what its score is worth where it gave any: AURC, and RouteLLM's APGR and CPT with
    prefill as the strong model. None without gated rows."""
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
    if metric_of(table) == "correct":
        ungated = paired("translated", table.tails("gated"))
        weak, strong = (table.column(name, "correct", items) for name in (ungated, "native"))
        calls = call_curve(weak, strong, score)
        found = {"apgr": calls.apgr(), "cpt_50": calls.cpt(0.5), "cpt_80": calls.cpt(0.8)}
        result |= {
            key: None if isinstance(value, Refused) else number(value)
            for key, value in found.items()
        }
    return result


def _ended(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Per tail how many requests ended there and how many of them were accepted; rows of older runs do not say."""
    known = [row for row in rows if row.tail is not None]
    return {
        str(tail): {"n": len(some), "accepted": sum(row.verdict != "discard" for row in some)}
        for tail in sorted({row.tail for row in known if row.tail is not None})
        if (some := [row for row in known if row.tail == tail])
    }
