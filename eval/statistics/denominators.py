"""The two denominators of a condition: the receiver alone, and leaving it with the sender."""

from __future__ import annotations

from typing import Any

from kvbridge.eval.statistics.metrics import metric_of
from kvbridge.eval.statistics.ratios import gap_recovered
from kvbridge.eval.statistics.table import Table, figure, number


def standalone(table: Table, condition: str) -> dict[str, Any] | None:
    """Against the receiver alone: t/d and the floor-normalised share (losses: ratio and
    recovery)."""
    metric = metric_of(table)
    items = table.items([condition, "native"], metric.column)
    if not items:
        return None
    figures = metric.standalone(table, condition, items)
    return {"metric": metric.reported, "n": len(items), **figures}


def cascading(table: Table, condition: str) -> dict[str, Any] | None:
    """Against leaving it with the sender: g − s, d − s, the share of the gap, and gain and harm
    apart."""
    metric = metric_of(table)
    items = table.items([condition, "native", "sender"], metric.column)
    gain = metric.advantage(table, condition, "sender")
    gap = metric.advantage(table, "native", "sender")
    if not items or gain is None or gap is None:
        return None
    documents = table.documents("native", items)
    s, d, g = (metric.scores(table, name, items) for name in ("sender", "native", condition))
    return {
        "metric": metric.reported,
        "n": len(items),
        "over_sender": figure(gain[0]) | {"p": number(gain[0].p)},
        "receiver_over_sender": figure(gap[0]) | {"p": number(gap[0].p)},
        "share_of_gap": figure(gap_recovered(s, d, g, documents)),
        **metric.outcomes(g, s, documents),
    }
