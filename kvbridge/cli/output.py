"""What commands print: lines for people on stderr, one JSON object or a table on stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table


def say(text: str) -> None:
    """One line for people, on stderr, so that --json output stays clean."""
    print(text, file=sys.stderr, flush=True)


def emit(body: Any) -> None:
    """The JSON answer of a command."""
    print(json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False))


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A plain table for people."""
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        shown.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        shown.add_row(*row)
    Console(highlight=False).print(shown)


def decimals(value: float | None) -> str:
    """A number with three decimals, a dash where there is none."""
    return "–" if value is None else f"{value:.3f}"
