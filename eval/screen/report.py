"""The report of a screening: verdicts, controls and predictors of every ordered pair, as one HTML
file and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbridge.eval.conditions.names import label
from kvbridge.eval.report import display
from kvbridge.eval.report.page import environment
from kvbridge.eval.screen.verdicts import EXTRAPOLATED, screened_controls, size
from kvbridge.files import write_file
from kvbridge.format import RUN_MARKDOWN, RUN_REPORT


@dataclass(frozen=True)
class Section:
    """One table: its title, lines of text above it, column names and rows of text."""

    title: str
    notes: list[str]
    columns: list[str]
    rows: list[list[str]]


def _pair(row: Mapping[str, Any]) -> str:
    return f"{row['sender']} → {row['receiver']}"


def sections(result: Mapping[str, Any]) -> list[Section]:
    """What a screening found, from `screening.json` alone."""
    pairs = result["pairs"]
    measured = [row for row in pairs if row["verdict"] is not None]
    known = sorted({key for row in pairs for key in row["predictors"]})
    notes = [
        "Recovery is the share of what the context is worth; controls need no translation. 95% "
        "intervals."
    ]
    if any(row["p_extrapolated"] for row in measured):
        notes.append(f"* {EXTRAPOLATED}.")
    return [
        Section(
            "Which pairs pay",
            notes,
            [
                "pair",
                "verdict",
                "recovery",
                *(label(c) for c in screened_controls()),
                "over the sender, nats/char",
                "p (Holm)",
                "right answers: sender",
                "translated",
                "receiver",
                "cost of a prefill",
                "break-even",
                "asset",
            ],
            [[_pair(row), *_outcome(row)] for row in measured],
        ),
        Section(
            "Known before fitting",
            ["From the first 16 documents of the training split."],
            ["pair", *(display.predictor(key) for key in known)],
            [
                [
                    _pair(row),
                    *(display.number(row["predictors"].get(key), "small") for key in known),
                ]
                for row in pairs
            ],
        ),
        _related(result["correlation_with_recovery"]),
        Section(
            "Not measured",
            [] if len(measured) < len(pairs) else ["Every pair was measured."],
            ["pair", "why"],
            [[_pair(row), row["reason"]] for row in pairs if row["verdict"] is None],
        ),
    ]


def _outcome(row: Mapping[str, Any]) -> list[str]:
    tokens, asset, right = row["break_even_tokens"], row["asset_bytes"], row["accuracy"]
    return [
        row["verdict"],
        display.figure({"value": row["recovery"], "ci": row["recovery_ci"]}, "percent"),
        *(display.number(row["controls"][control], "percent") for control in screened_controls()),
        display.number(row["over_sender"], "loss", signed=True),
        display.number(row["p_holm"], "p") + ("*" if row["p_extrapolated"] else ""),
        *(
            display.number(right[condition], "percent")
            for condition in ("sender", "translated", "native")
        ),
        display.number(row["prefill_share"], "percent"),
        "–" if tokens is None else f"{tokens:,.0f} tokens",
        "–" if asset is None else size(asset),
    ]


def _related(related: Mapping[str, Any]) -> Section:
    title, columns = (
        "Do the predictors predict recovery?",
        ["predictor", "pairs", "Spearman", "Pearson", "p (Holm)"],
    )
    if "refused" in related:
        return Section(title, [f"Not shown: {related['refused']}."], columns, [])
    rows = []
    for key, value in related.items():
        if "refused" in value:
            rows.append([display.predictor(key), f"not shown: {value['refused']}", "–", "–", "–"])
        else:
            rows.append(
                [
                    display.predictor(key),
                    f"{value['pairs']}",
                    display.number(value["spearman"], "loss", True),
                    display.figure(
                        {"value": value["pearson"], "ci": value["pearson_ci"]}, "loss", True
                    ),
                    display.number(value["p_holm"], "p"),
                ]
            )
    return Section(
        title, ["Over the measured pairs, corrected for the number of predictors."], columns, rows
    )


def headline(result: Mapping[str, Any]) -> str:
    """How many pairs got which verdict."""
    verdicts = [row["verdict"] or "not measured" for row in result["pairs"]]
    counts = [f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts)]
    return f"{len(verdicts)} ordered pairs: {', '.join(counts)}"


def render_fleet(result: Mapping[str, Any], command: str | None = None) -> str:
    """The screening as one HTML file without scripts or network; every text is escaped."""
    template = environment().get_template("fleet.html.jinja")
    return template.render(
        headline=headline(result),
        fleet=result["fleet"]["words"],
        tables=sections(result),
        command=command,
    )


def fleet_markdown(result: Mapping[str, Any], command: str | None = None) -> str:
    """The same for a pull request."""
    lines = [f"**{headline(result)}**", "", display.plain(result["fleet"]["words"])]
    for section in sections(result):
        lines += ["", f"### {section.title}", "", *(display.plain(note) for note in section.notes)]
        if section.rows:
            lines += ["", "| " + " | ".join(map(display.plain, section.columns)) + " |"]
            lines += ["|---" * len(section.columns) + "|"]
            lines += ["| " + " | ".join(map(display.plain, cells)) + " |" for cells in section.rows]
    lines += ["", f"`{command.replace('`', '')}`"] if command else []
    return "\n".join(lines) + "\n"


def write_fleet_report(folder: Path, result: Mapping[str, Any], command: str | None = None) -> None:
    """Writes `report.html` and `summary.md` into a screening's folder, each whole or not at all."""
    write_file(folder / RUN_REPORT, render_fleet(result, command).encode())
    write_file(folder / RUN_MARKDOWN, fleet_markdown(result, command).encode())
