"""The summary as Markdown, for a pull request."""

from __future__ import annotations

from typing import Any

from kvbridge.eval.conditions.names import label, ordered
from kvbridge.eval.report.display import (
    Column,
    Summary,
    columns,
    figure,
    interval,
    measured,
    number,
    pair_name,
    plain,
)
from kvbridge.eval.report.gate_words import gate_words
from kvbridge.eval.statistics.metrics import METRICS
from kvbridge.eval.tasks import label_of


def markdown(summary: Summary, command: str | None = None) -> str:
    """The summary for a pull request: headline, conditions, both denominators, what is missing."""
    shown, (sender, receiver) = columns(summary), pair_name(summary)
    lines = [
        f"**{plain(summary['headline'])}**",
        "",
        f"{plain(sender)} → {plain(receiver)}, {measured(summary)} from {summary['documents']} "
        "documents, 95% intervals clustered by document.",
        "",
        "| condition | " + " | ".join(f"{c.heading} ({c.unit})" for c in shown) + " |",
        "|---|" + "---:|" * len(shown),
    ]
    for name in ordered(summary["conditions"]):
        cells = [_cell(summary["conditions"][name], column) for column in shown]
        lines.append(f"| {plain(label(name))} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| both denominators | standalone | over the sender | share of the gap |",
        "|---|---:|---:|---:|",
    ]
    for task, conditions in summary["denominators"]["cascading"].items():
        lines += [_denominator(summary, task, name) for name in ordered(conditions)]
    counts = summary["counts"]
    lines += [
        "",
        f"{counts['failed']} failed, {counts['excluded']} excluded, {counts['missing']} missing "
        "rows (rows are items times conditions).",
    ]
    for words in gate_words(summary):
        lines += ["", plain(words)]
    lines += ["", f"`{command.replace('`', '')}`"] if command else []
    return "\n".join(lines) + "\n"


def _cell(condition: dict[str, Any], column: Column) -> str:
    value = number(condition[column.key], column.style)
    ci = interval(condition[f"{column.key}_ci"], column.style)
    return f"{value} <sub>{ci}</sub>" if ci else value


def _denominator(summary: Summary, task: str, name: str) -> str:
    over = summary["denominators"]["cascading"][task][name]
    alone = summary["denominators"]["standalone"][task].get(name, {})
    metric = next(one for one in METRICS.values() if one.reported == over["metric"])
    cells = [
        figure(alone.get(metric.shown_as), "percent"),
        figure(over["over_sender"], metric.style, signed=True, unit=f" {metric.short_unit}"),
        figure(over["share_of_gap"], "percent"),
    ]
    return f"| {label_of(task)}, {plain(label(name)).lower()} | " + " | ".join(cells) + " |"
