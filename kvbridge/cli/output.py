"""What commands print: a line for people on stderr, one JSON object or a table on stdout."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table


def say(text: str) -> None:
    """One line for people, on stderr, so that --json output stays clean."""
    Console(stderr=True, highlight=False).print(text, soft_wrap=True, markup=False)


def emit(body: Any) -> None:
    """The JSON answer of a command."""
    print(json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False))


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A plain table for people."""
    found = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        found.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        found.add_row(*row)
    Console(highlight=False).print(found)
