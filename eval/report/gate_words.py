"""What a gate decided, what it costs and where its requests ended, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbridge.eval.report.display import Summary, interval, number
from kvbridge.eval.tasks import label_of


def gate_words(summary: Summary) -> list[str]:
    """Per task what the gate decided and why, and what it saves or costs; verdicts and reasons as a
    Decision names them."""
    lines = []
    for task, decided in (summary["gate"] or {}).items():
        said = _counted(decided["verdicts"])
        why = _counted(decided.get("reasons", {}))
        lines.append(f"Gate, {label_of(task)}: {said}" + (f" ({why})" if why else ""))
        if ended := rungs(summary, decided):
            lines.append(f"Repair ladder, {label_of(task)}: {', '.join(ended)}")
        if cost := gate_cost(summary, task):
            lines.append(f"Cost, {label_of(task)}: {cost}")
    return lines


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def gate_cost(summary: Summary, task: str) -> str:
    """What requests behind the gate cost on average, refused ones included, beside prefilling them
    all; empty where no row says."""
    gated = summary["tasks"][task]["conditions"]["gated"]
    share = gated["prefill_share"]
    if share is None:
        return ""
    ci = interval(gated["prefill_share_ci"], "percent")
    worth = "the gate costs more than it saves here"
    if share <= 1:
        worth = f"the gate saves {number(1 - share, 'percent')} of a prefill"
    return (
        f"behind the gate a request takes {number(share, 'percent')} of a prefill's FLOPs on "
        "average" + (f" ({ci}, 95% interval)" if ci else "") + f", native 100%: {worth}"
    )


def rungs(summary: Summary, decided: Mapping[str, Any]) -> list[str]:
    """Where requests ended on a ladder, a rung each, those that none reached among them; nothing
    for a gate of one plan."""
    ended = {int(tail): counts for tail, counts in (decided.get("tails") or {}).items()}
    tails = sorted({*ended, *(summary["pair"].get("gate_tails") or ())})
    if len(tails) < 2:
        return []
    lines = []
    for tail in tails:
        counts = ended.get(tail, {"n": 0, "accepted": 0})
        lines.append(f"{counts['n']} ended at tail {tail}, {counts['accepted']} of them accepted")
    return lines


def rows_left_out(summary: Summary) -> str:
    """How many rows were not used, and that a row is no item; empty where all were."""
    counts = {what: summary["counts"][what] for what in ("failed", "excluded", "missing")}
    lost = _counted({what: count for what, count in counts.items() if count})
    return f"Rows left out (rows are items times conditions): {lost}" if lost else ""
