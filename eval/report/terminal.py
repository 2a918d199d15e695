"""The summary as a table for the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvbridge.eval.conditions.names import label, ordered
from kvbridge.eval.report.display import (
    Column,
    Summary,
    columns,
    interval,
    measured,
    number,
    pair_name,
    role,
)
from kvbridge.eval.report.gate_words import gate_words, rows_left_out

WIDE = 100
"""Columns of a terminal from which loss and agreement are shown, too."""


@dataclass(frozen=True)
class Terminal:
    """The headline, the reasons and one row per condition, for `rich.print`."""

    summary: Summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        summary = self.summary
        yield Text(summary["headline"], style="bold")
        for reason in summary["verdict_reasons"][1:]:
            yield Padding(Text(reason, style="dim"), (0, 0, 0, 2))
        yield Text("")
        pair = " → ".join(pair_name(summary))
        yield Text(f"{pair}, {measured(summary)}, {summary['documents']} documents")
        left_out = () if options.max_width >= WIDE else ("loss", "agreement")
        yield self._table([column for column in columns(summary) if column.key not in left_out])
        if lost := rows_left_out(summary):
            yield Text(lost, style="yellow")
        for line in gate_words(summary):
            yield Text(line)

    def _table(self, shown: list[Column]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("")
        for column in shown:
            unit = " ms" if column.style == "ms" else ""
            table.add_column(column.heading + unit, justify="right")
        for name in ordered(self.summary["conditions"]):
            condition, cells = self.summary["conditions"][name], []
            for column in shown:
                cell = Text(number(condition[column.key], column.style))
                ci = interval(condition[f"{column.key}_ci"], column.style)
                if ci:
                    cell.append("\n" + ci.replace(" to ", "–"), style="dim")
                cells.append(cell)
            style = "bold" if role(name) == "subject" else ""
            table.add_row(Text(label(name), style=style), *cells)
        return table
