"""How far a command is, on stderr: for people at a terminal, and for those who read its log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta


class Line:
    """One line on stderr that changes as work goes on: rewritten in place on a terminal, elsewhere (a log file) a new line at
    most every `every_s` seconds, the first after as many. `clock`: seconds."""

    def __init__(self, every_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.every_s, self.clock = every_s, clock
        self.shown = clock()

    def show(self, text: str, *, last: bool = False) -> None:
        """Shows `text` if it is time to; on a terminal `last` always, and it stays."""
        now, terminal = self.clock(), sys.stderr.isatty()
        if now - self.shown >= (0.2 if terminal else self.every_s) or (terminal and last):
            self.shown = now
            print(
                f"\r{text}   " if terminal else text,
                end="" if terminal and not last else "\n",
                file=sys.stderr,
                flush=True,
            )


def progress_of(what: str, line: Line | None = None) -> Callable[[str, int, float], None]:
    """Tokens and tokens/s per model on stderr; how many there will be is not known while texts stream."""
    tokens: dict[str, int] = {}
    line = line or Line()

    def report(part: str, count: int, seconds: float) -> None:
        tokens[part] = tokens.get(part, 0) + count
        parts = ", ".join(f"{p} {n:,} tokens" for p, n in tokens.items())
        line.show(f"{what}: {parts} ({tokens[part] / max(seconds, 1e-9):,.0f} {part} tokens/s)")

    return report


def counted(what: str, line: Line | None = None) -> Callable[[int, int, str], None]:
    """n of N with the time left on stderr, by the pace since the first report (a continued run begins in the middle, and
    counts that go back begin anew)."""
    line = line or Line()
    start, first, before = line.clock(), 0, 0

    def report(done: int, total: int, task: str) -> None:
        nonlocal start, first, before
        if done <= before or before == 0:
            start, first = line.clock(), done
        before = done
        left = ""
        if done > first:
            seconds = round((line.clock() - start) / (done - first) * (total - done))
            left = f", {timedelta(seconds=seconds)} left"
        line.show(f"{what}: {done} of {total} ({task}){left}", last=done == total)

    return report
