"""Pieces of a Markdown page: a table, numbers as people read them, and blocks that are replaced."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvbridge.errors import UsageError


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """One Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def share(value: float | None, digits: int = 1) -> str:
    """A share in per cent."""
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def number(value: float | None) -> str:
    """Two digits."""
    return "–" if value is None else f"{value:.2f}"


def into(page: str, section: str, parts: dict[str, str]) -> str:
    """The page with the blocks of a section replaced. Raises UsageError where the page has no such
    block."""
    for name, text in parts.items():
        block = re.compile(
            rf"(<!-- {re.escape(section)}: {name} -->\n).*?(<!-- end -->)", re.DOTALL
        )
        match = block.search(page)
        if match is None:
            raise UsageError(
                f"expected a block <!-- {section}: {name} --> … <!-- end --> in the page, "
                "found none"
            )
        page = page[: match.end(1)] + text + page[match.start(2) :]
    return page
