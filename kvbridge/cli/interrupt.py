"""Ctrl-C and SIGTERM: a command ends with one line that says what it leaves behind and how to go
on."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from kvbridge.format import RUN_ASSET, RUN_ROWS, RUN_SUMMARY

SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM"}


@dataclass(frozen=True)
class Left:
    """What an interrupted command leaves: in words, and whether it goes on from there (else it
    begins again)."""

    words: str
    goes_on: bool = False


class Interrupted(BaseException):
    """A signal that asks the command to end.

    No KeyboardInterrupt, which the argument parser would take for its own, and no Exception, which
    might count as one pair's or one item's failure.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number)
        self.number = number
        self.left: Left | None = None

    @property
    def code(self) -> int:
        """The exit code that shells give a process that this signal ended."""
        return 128 + self.number

    def line(self, command: list[str]) -> str:
        """What happened, what is kept, and the command to go on with."""
        left = self.left or Left("the command did not finish")
        how = "go on with" if left.goes_on else "begin again with"
        return f"{SIGNALS[self.number]}; {left.words}; {how}: {shlex.join(command)}"


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside the block the first SIGINT or SIGTERM raises Interrupted, so that files and processes
    are closed; another one ends the process at once. Signals that were ignored (nohup) stay so, and
    nothing changes outside the main thread, where Python takes no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    raise Interrupted(signal.Signals(number))


@contextmanager
def leaving(left: Callable[[], Left]) -> Iterator[None]:
    """Inside the block, an interrupt takes along what `left` says that it leaves."""
    try:
        yield
    except Interrupted as interrupted:
        if interrupted.left is None:
            interrupted.left = left()
        raise


def left_whole(what: str, out: Path) -> Left:
    """What is left by a command that writes its folder whole, at the end."""
    if out.exists():
        return Left(f"{what} was already written to {out}")
    return Left(f"nothing is kept in {out}, for {what} is written whole, at the end")


def left_run(out: Path) -> Left:
    """What is left by a command that fits into `out` or finds a translator, and appends rows."""
    kept = []
    if (out / RUN_ASSET).exists():
        kept.append("the translator")
    if rows := _rows(out):
        kept.append(f"{rows} rows")
    if not kept:
        return Left(f"nothing is kept in {out} yet")
    return Left(f"kept in {out}: {' and '.join(kept)}", goes_on=True)


def left_fleet(out: Path, pairs: int) -> Left:
    """What is left by a screening of `pairs` into `out`: a run folder each."""
    folders = [path for path in out.iterdir() if path.is_dir()] if out.is_dir() else []
    finished = sum((folder / RUN_SUMMARY).exists() for folder in folders)
    translators = sum((folder / RUN_ASSET).exists() for folder in folders)
    rows = sum(map(_rows, folders))
    return Left(
        f"kept in {out}: {finished} of {pairs} pairs finished, {translators} translators, {rows} "
        "rows",
        goes_on=bool(translators or rows),
    )


def _rows(out: Path) -> int:
    """Whole lines of a run's rows."""
    path = out / RUN_ROWS
    return path.read_bytes().count(b"\n") if path.exists() else 0
