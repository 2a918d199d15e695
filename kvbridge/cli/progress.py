"""How far a command is, on stderr: a bar for people at a terminal, plain lines in a log.

Each of `counted`, `tokens_read` and `transferred` is a context manager that gives a callback; work
that knows nothing of terminals calls it with what is done.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

BAR_S = 0.2
"""Least seconds between two drawings of a bar."""


class Line:
    """One line of progress: a bar that is redrawn where stderr is a terminal, else (a log file) a
    new line at most every `every_s` seconds, the first after as many. `clock`: seconds.

    The bar is drawn by whoever reports, not by a thread, for commands start processes meanwhile.
    """

    def __init__(self, every_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._terminal = sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._every_s = BAR_S if self._terminal else every_s
        self._shown = clock()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def show(self, what: str, text: str, done: int | None = None, total: int | None = None) -> None:
        """Shows `what: text` if it is time to; a bar always shows that all is done. Without `total`
        it is not known how much there will be."""
        now = self.clock()
        finished = self._terminal and total is not None and done == total
        if now - self._shown < self._every_s and not finished:
            return
        self._shown = now
        if self._terminal:
            self._draw(what, text, done, total)
        else:
            print(f"{what}: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leaves the bar as it stands and gives the terminal back."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, what: str, text: str, done: int | None, total: int | None) -> None:
        if self._bar is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
            self._task = self._bar.add_task(what, total=total, text=text)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total, text=text, refresh=True)


@contextmanager
def _line(given: Line | None) -> Iterator[Line]:
    line = given or Line()
    try:
        yield line
    finally:
        line.close()


@contextmanager
def tokens_read(
    what: str, given: Line | None = None
) -> Iterator[Callable[[str, int, float], None]]:
    """The callback takes a model's role, tokens it has read since the last call, and its seconds so
    far. How many tokens there will be is not known while texts stream."""
    tokens: dict[str, int] = {}

    with _line(given) as line:

        def report(role: str, count: int, seconds: float) -> None:
            tokens[role] = tokens.get(role, 0) + count
            counts = ", ".join(f"{name} {number:,} tokens" for name, number in tokens.items())
            pace = tokens[role] / max(seconds, 1e-9)
            line.show(what, f"{counts} ({pace:,.0f} {role} tokens/s)")

        yield report


@contextmanager
def counted(what: str, given: Line | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """The callback takes how many are done, how many there are, and what the last one was."""
    with _line(given) as line:
        pace = _Pace(line.clock)

        def report(done: int, total: int, which: str) -> None:
            left = pace.left(done, total)
            line.show(what, f"{done} of {total} ({which}){left}", done, total)

        yield report


@contextmanager
def transferred(what: str, given: Line | None = None) -> Iterator[Callable[[int, int], None]]:
    """The callback takes bytes that are done, and how many there are."""
    with _line(given) as line:
        pace = _Pace(line.clock)

        def report(done: int, total: int) -> None:
            left = pace.left(done, total)
            line.show(what, f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB{left}", done, total)

        yield report


class _Pace:
    """Time left by the pace since the first report: a continued run begins in the middle. Counts
    that go back belong to something else (the next pair of a fleet), which begins anew."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start, self._first, self._before = clock(), 0, 0

    def left(self, done: int, total: int) -> str:
        """`, 0:01:10 left`; nothing at the first report, from which no pace follows."""
        if done <= self._before or self._before == 0:
            self._start, self._first = self._clock(), done
        self._before = done
        if done <= self._first:
            return ""
        seconds_each = (self._clock() - self._start) / (done - self._first)
        return f", {timedelta(seconds=round(seconds_each * (total - done)))} left"
