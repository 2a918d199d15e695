"""Rows that could not be used: how many of how many, where the first of them stand, and when there
are too many to go on."""

from __future__ import annotations

from collections.abc import Callable

from kvbridge.errors import DataError

MOST_SHARE = 0.01
"""Share of the rows that may be left out."""
FEW_ROWS = 3
"""Rows that may be left out however few there are, unless they are a quarter of all."""
FIRST_ROWS = 20
"""Rows of which one must be good before more are read."""
SETTLED_ROWS = 1000
"""Rows after which the share is looked at while reading; before, once all are read."""
NAMED = 3
"""Rows whose place and reason are kept."""
LONGEST_REASON = 200


class Skipped:
    """Counts rows as they are read, and keeps the place and reason of the first bad ones.

    One bad row late in a long corpus is no reason to end a fit; many are a sign that the corpus is
    not what it is taken for. `say` gets one line at the end of the reading where rows were left
    out.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.rows = 0
        self.count = 0
        self._say = say
        self._named: list[str] = []

    def read(self) -> None:
        """Counts one row, good or bad."""
        self.rows += 1

    def add(self, place: str, reason: str) -> None:
        """Counts the last row read as a bad one; raises DataError where there are too many."""
        self.count += 1
        if len(self._named) < NAMED:
            short = " ".join(reason.split())
            if len(short) > LONGEST_REASON:
                short = short[:LONGEST_REASON] + "…"
            self._named.append(f"{place}: {short}")
        all_of_the_first = self.count == self.rows >= FIRST_ROWS
        too_many = self.rows >= SETTLED_ROWS and self.count > MOST_SHARE * self.rows
        if all_of_the_first or too_many:
            self._refuse()

    def close(self) -> None:
        """All rows are read: raises DataError where too many were bad, else says which were."""
        few = self.count <= FEW_ROWS and 4 * self.count <= self.rows
        if not few and self.count > MOST_SHARE * self.rows:
            self._refuse()
        line = self.line()
        if line is not None and self._say is not None:
            self._say(line)

    def line(self) -> str | None:
        """What was left out and why, in one line; None where nothing was."""
        if not self.count:
            return None
        more = "; …" if self.count > len(self._named) else ""
        return f"{self.count:,} of {self.rows:,} rows left out: {'; '.join(self._named)}{more}"

    def _refuse(self) -> None:
        if self.rows == 1:
            raise DataError(self._named[0])
        raise DataError(
            f"{self.count:,} of {self.rows:,} rows cannot be used, which is too many to leave out "
            f"(more than {MOST_SHARE:.0%}): {'; '.join(self._named)}"
        )
