"""Summaries, screenings and times as people see them in a terminal."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from kvbridge.cli.output import decimals, emit, say, table
from kvbridge.eval.report.terminal import Terminal
from kvbridge.eval.run.latency import Latency, break_even
from kvbridge.eval.screen.data import SEQUENCES
from kvbridge.eval.screen.verdicts import screening_table


def show(summary: dict[str, Any], as_json: bool) -> None:
    """A summary for people or machines."""
    if as_json:
        emit(summary)
    else:
        Console().print(Terminal(summary))


def show_latency(rows: list[Latency]) -> None:
    """Prints handoff against prefill."""
    table(
        "time to the first token: handoff (translate, repair, last token) against prefill",
        ["prompt tokens", "handoff ms", "prefill ms", "prefill ÷ handoff", "FLOPs share"],
        [_cells(row) for row in rows],
    )
    tokens = break_even(rows)
    print(f"break-even: {'never at these lengths' if tokens is None else f'{tokens} tokens'}")


def _cells(row: Latency) -> list[str]:
    return [
        str(row.tokens),
        f"{row.handoff_ms:.1f}",
        f"{row.prefill_ms:.1f}",
        f"{row.ratio:.2f}",
        f"{row.flops_share:.2f}",
    ]


def show_screening(result: dict[str, Any]) -> None:
    """A screening for people: outcomes, predictors, and how these are related where pairs
    suffice."""
    Console().print(screening_table(result))
    names = sorted({name for row in result["pairs"] for name in row["predictors"]})
    rows = []
    for row in result["pairs"]:
        values = [decimals(row["predictors"].get(name)) for name in names]
        rows.append([f"{row['sender']} → {row['receiver']}", *values])
    table(f"before fitting, from {SEQUENCES} sequences", ["pair", *names], rows)
    related = result["correlation_with_recovery"]
    if "refused" in related:
        say(f"correlation of predictors with recovery: {related['refused']}")
    else:
        say(json.dumps(related))
