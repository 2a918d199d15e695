"""How figures read: names of conditions, numbers with their intervals, the terminal table, the Markdown summary.

Everything here takes the summary as it stands in `summary.json`, so a report can be made again from the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvbridge.eval.conditions.plans import OWN_TAIL, is_subject, ordered, parsed

Summary = Mapping[str, Any]

LABELS = {
    "native": "Receiver's own prefill",
    "sender": "Sender, no switch",
    "translated": "Translated",
    "gated": "Behind the gate",
    "no_context": "No context",
    "wrong_document": "Wrong document",
    "token_only": "Token-only map",
    "tail_only": "Tail only",
    "raw_sender": "Sender's cache, raw",
}
TASKS = {
    "continuation": "Continuation",
    "recall": "Recall",
    "multiple_choice": "Multiple choice",
    "qa": "QA",
}


@dataclass(frozen=True)
class Metric:
    """A column: its key in a condition of the summary, its heading, and how a value of it is written."""

    key: str
    heading: str
    unit: str
    style: str


METRICS = (
    Metric("recovery", "Recovery", "of the context's worth", "percent"),
    Metric("loss", "Loss", "nats / character", "loss"),
    Metric("kl", "KL", "nats, from native", "small"),
    Metric("agreement", "Agreement", "same next token", "percent"),
    Metric("accuracy", "Accuracy", "right answers", "percent"),
    Metric("prefill_share", "Cost", "of a prefill's FLOPs", "percent"),
    Metric("ttft_ms", "First token", "ms, median", "ms"),
)


def label(condition: str) -> str:
    """A condition in words."""
    if condition.endswith(OWN_TAIL):
        return f"{label(condition.removesuffix(OWN_TAIL))}, each at its own tail"
    route, tail = parsed(condition) or (condition, 1)
    if route == "tail_only" and tail > 1:
        return f"Tail {tail} only"
    return LABELS.get(route, route.replace("_", " ")) + (f", tail {tail}" if tail > 1 else "")


PREDICTORS = {
    "end_match": "token ends that match",
    "loss_gap": "sender's loss over the receiver's, nats per character",
    "cka": "CKA of the most similar layers",
    "cca": "CCA of the same layers",
    "r2_tokens": "R² from the receiver's tokens alone",
    "r2_gain": "R² that a sender layer adds",
}


def predictor(name: str) -> str:
    """What a predictor is, in words."""
    return PREDICTORS.get(name, name.replace("_", " "))


def role(condition: str) -> str:
    """`subject`, `ceiling` (the two denominators) or `control`."""
    if condition in ("native", "sender"):
        return "ceiling"
    return "subject" if is_subject(condition) else "control"


def number(value: float | None, style: str, signed: bool = False) -> str:
    """A value in words: an en dash where it does not apply, a true minus sign, two to four significant digits."""
    if value is None:
        return "–"
    sign = "+" if signed else ""
    if style == "percent":
        text = (
            f"{100 * value:{sign}.1f}%"
            if abs(value) < 0.9995 or value > 1.0005
            else f"{100 * value:{sign}.0f}%"
        )
    elif style == "points":
        text = f"{100 * value:{sign}.1f}"
    elif style == "loss":
        text = f"{value:{sign}.3f}"
    elif style == "ms":
        text = f"{value:{sign}.0f}" if abs(value) >= 100 else f"{value:{sign}.1f}"
    elif style == "axis":
        text = f"{value:.2g}"
    elif style == "p":
        return "< 0.001" if value < 0.001 else f"{value:.3f}"
    elif style == "count":
        return f"{value:,.0f}"
    else:
        text = f"{value:{sign}#.3g}" if value else "0"
    return text.replace("-", "\N{MINUS SIGN}")


def interval(ci: list[float | None] | None, style: str, signed: bool = False) -> str:
    """`low to high` without the unit, or nothing where there is no interval or it is a point."""
    if not ci or ci[0] is None or ci[1] is None:
        return ""
    low, high = (number(bound, style, signed).rstrip("%") for bound in ci)
    return "" if low == high else f"{low} to {high}"


def columns(summary: Summary) -> list[Metric]:
    """The metrics that any condition has a value for."""
    return [
        m for m in METRICS if any(c.get(m.key) is not None for c in summary["conditions"].values())
    ]


def pair_name(summary: Summary) -> tuple[str, str]:
    """Sender and receiver as they are to be shown; the row digest stands in where the run did not name them."""
    pair = summary["pair"]
    sender, receiver = (pair.get(side) for side in ("sender", "receiver"))
    names = [
        side.get("id", "?") if isinstance(side, Mapping) else side for side in (sender, receiver)
    ]
    return (str(names[0] or "sender"), str(names[1] or "receiver"))


def measured(summary: Summary) -> str:
    """How many items were measured, and how many were not."""
    left_out = summary.get("n_left_out", 0)
    return f"{summary['n']} items" + (f" ({left_out} left out)" if left_out else "")


def gate_words(summary: Summary) -> list[str]:
    """Per task what the gate decided and why, and what it saves or costs; verdicts and reasons as a Decision names them."""
    lines = []
    for task, found in (summary["gate"] or {}).items():
        said = ", ".join(f"{count} {verdict}" for verdict, count in found["verdicts"].items())
        why = ", ".join(f"{count} {reason}" for reason, count in found.get("reasons", {}).items())
        lines.append(f"Gate, {TASKS.get(task, task)}: {said}" + (f" ({why})" if why else ""))
        if ended := rungs(summary, found):
            lines.append(f"Repair ladder, {TASKS.get(task, task)}: {', '.join(ended)}")
        if cost := gate_cost(summary, task):
            lines.append(f"Cost, {TASKS.get(task, task)}: {cost}")
    return lines


def gate_cost(summary: Summary, task: str) -> str:
    """What requests behind the gate cost on average, refused ones included, beside prefilling them all; empty where no row says."""
    gated = summary["tasks"][task]["conditions"]["gated"]
    if (share := gated["prefill_share"]) is None:
        return ""
    ci = interval(gated["prefill_share_ci"], "percent")
    worth = (
        "the gate costs more than it saves here"
        if share > 1
        else f"the gate saves {number(1 - share, 'percent')} of a prefill"
    )
    return (
        f"behind the gate a request takes {number(share, 'percent')} of a prefill's FLOPs on average"
        + (f" ({ci}, 95% interval)" if ci else "")
        + f", native 100%: {worth}"
    )


def rows_left_out(summary: Summary) -> str:
    """How many rows were not used, and that a row is no item; empty where all were."""
    lost = [
        f"{n} {what}"
        for what in ("failed", "excluded", "missing")
        if (n := summary["counts"][what])
    ]
    return f"Rows left out (rows are items times conditions): {', '.join(lost)}" if lost else ""


def rungs(summary: Summary, gate: Mapping[str, Any]) -> list[str]:
    """Where requests ended on a ladder, a rung each, those that none reached among them; nothing for a gate of one plan."""
    ended = {int(tail): counts for tail, counts in (gate.get("tails") or {}).items()}
    tails = sorted({*ended, *(summary["pair"].get("gate_tails") or ())})
    found = [(tail, ended.get(tail, {"n": 0, "accepted": 0})) for tail in tails]
    return [
        f"{c['n']} ended at tail {tail}, {c['accepted']} of them accepted"
        for tail, c in found
        if len(tails) > 1
    ]


@dataclass(frozen=True)
class Terminal:
    """The headline, the reasons and one row per condition, for `rich.print`; drops loss and agreement below 100 columns."""

    summary: Summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        summary = self.summary
        yield Text(summary["headline"], style="bold")
        for reason in summary["verdict_reasons"][1:]:
            yield Padding(Text(reason, style="dim"), (0, 0, 0, 2))
        yield Text("")
        yield Text(
            f"{' → '.join(pair_name(summary))}, {measured(summary)}, {summary['documents']} documents"
        )
        narrow = options.max_width < 100
        yield self._table(
            [m for m in columns(summary) if not narrow or m.key not in ("loss", "agreement")]
        )
        if lost := rows_left_out(summary):
            yield Text(lost, style="yellow")
        for line in gate_words(summary):
            yield Text(line)

    def _table(self, shown: list[Metric]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("")
        for metric in shown:
            table.add_column(
                metric.heading + (" ms" if metric.style == "ms" else ""), justify="right"
            )
        for name in ordered(self.summary["conditions"]):
            condition, cells = self.summary["conditions"][name], []
            for metric in shown:
                cell = Text(number(condition[metric.key], metric.style))
                if ci := interval(condition[f"{metric.key}_ci"], metric.style):
                    cell.append("\n" + ci.replace(" to ", "–"), style="dim")
                cells.append(cell)
            table.add_row(
                Text(label(name), style="bold" if role(name) == "subject" else ""), *cells
            )
        return table


def markdown(summary: Summary, command: str | None = None) -> str:
    """The summary for a pull request: headline, conditions, both denominators, what is missing."""
    shown, (sender, receiver) = columns(summary), pair_name(summary)
    lines = [
        f"**{plain(summary['headline'])}**",
        "",
        f"{plain(sender)} → {plain(receiver)}, {measured(summary)} from {summary['documents']} documents, "
        "95% intervals clustered by document.",
        "",
        "| condition | " + " | ".join(f"{m.heading} ({m.unit})" for m in shown) + " |",
        "|---|" + "---:|" * len(shown),
    ]
    for name in ordered(summary["conditions"]):
        condition = summary["conditions"][name]
        cells = [
            f"{number(condition[m.key], m.style)} <sub>{interval(condition[f'{m.key}_ci'], m.style)}</sub>".replace(
                " <sub></sub>", ""
            )
            for m in shown
        ]
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
        f"{counts['failed']} failed, {counts['excluded']} excluded, {counts['missing']} missing rows "
        "(rows are items times conditions).",
    ]
    lines += [line for words in gate_words(summary) for line in ("", plain(words))]
    lines += ["", f"`{command.replace('`', '')}`"] if command else []
    return "\n".join(lines) + "\n"


def _denominator(summary: Summary, task: str, name: str) -> str:
    found = summary["denominators"]["cascading"][task][name]
    alone = summary["denominators"]["standalone"][task].get(name, {})
    kept = alone.get("floor_normalised") if found["metric"] == "loss" else alone.get("retention")
    style, unit = ("loss", " nats/char") if found["metric"] == "loss" else ("points", " points")
    cells = [
        figure(kept, "percent"),
        figure(found["over_sender"], style, signed=True, unit=unit),
        figure(found["share_of_gap"], "percent"),
    ]
    return f"| {TASKS.get(task, task)}, {plain(label(name)).lower()} | " + " | ".join(cells) + " |"


def figure(
    found: Mapping[str, Any] | None, style: str, signed: bool = False, unit: str = ""
) -> str:
    """`value [low to high]`, or why there is none."""
    if not found or found["value"] is None:
        return f"not shown: {found['refused']}" if found and found.get("refused") else "–"
    ci = interval(found["ci"], style, signed)
    return f"{number(found['value'], style, signed)}{unit}" + (f" [{ci}]" if ci else "")


def plain(text: str) -> str:
    """Text that Markdown and HTML leave as it is."""
    escaped = "".join(f"\\{c}" if c in "\\`*_{}[]|#" else c for c in text)
    return escaped.replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
