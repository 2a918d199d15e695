"""Progress where nobody watches a terminal: a log has a plain line now and then, with what is done
and what is left."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from kvbridge.cli.evaluate import EvalCommand, run_eval
from kvbridge.cli.output import say
from kvbridge.cli.progress import Line, counted, tokens_read, transferred
from tests.eval.conftest import demo_asset, demo_data

__all__ = ["demo_asset", "demo_data"]


class Stream(io.StringIO):
    """Stderr, as a terminal or as a file."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        """What it was made as."""
        return self.terminal


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def log_of(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Stderr from here on, as a file."""
    stream = Stream(terminal=False)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_a_log_has_a_plain_line_every_thirty_seconds_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    log = log_of(monkeypatch)
    with counted("items", Line(clock=clock)) as report:
        for done in range(1, 41):
            clock.now += 10
            report(done, 400, "recall")
    lines = log.getvalue().splitlines()
    assert len(lines) == 13, "400 seconds, a line each 30, the first after 30"
    assert lines[0] == "items: 3 of 400 (recall), 1:06:10 left", "397 to go at 10 s each"
    assert lines[-1] == "items: 39 of 400 (recall), 1:00:10 left"
    assert "\r" not in log.getvalue()


def test_a_continued_run_is_timed_from_where_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    log = log_of(monkeypatch)
    with counted("items", Line(clock=clock)) as report:
        for done in (301, 302, 303, 304):
            clock.now += 10
            report(done, 310, "recall")
        assert log.getvalue() == "items: 303 of 310 (recall), 0:01:10 left\n"
        clock.now += 3600
        for done in (1, 2, 3):
            clock.now += 10
            report(done, 5, "qa")
    assert log.getvalue().splitlines()[1:] == ["items: 1 of 5 (qa)"], (
        "the next pair of a fleet begins anew"
    )


def test_a_fit_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    log = log_of(monkeypatch)
    with tokens_read("fit", Line(clock=clock)) as report:
        for second in range(1, 36):
            clock.now += 1
            report("sender", 1000, float(second))
    assert log.getvalue() == "fit: sender 30,000 tokens (1,000 sender tokens/s)\n"


def test_a_transfer_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    log = log_of(monkeypatch)
    with transferred("pulling", Line(clock=clock)) as report:
        for megabytes in range(0, 300, 20):
            clock.now += 4
            report(megabytes * 10**6, 10**9)
    assert log.getvalue() == "pulling: 140.0 of 1,000.0 MB, 0:02:52 left\n"


def seen(output: str) -> list[str]:
    """The lines that stand in a terminal after `output`, which moves the cursor up and erases."""
    lines = [""]
    for piece in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)", output):
        if piece == "\n":
            lines.append("")
        elif piece.endswith("A") and piece.startswith("\x1b"):
            lines.pop()
        elif piece == "\r" or piece.endswith("K"):
            lines[-1] = ""
        elif not piece.startswith("\x1b"):
            lines[-1] += piece
    return [line.rstrip() for line in lines if line.strip()]


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Stderr from here on, as a terminal that can move its cursor."""
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return stream


def test_a_terminal_has_one_bar_that_is_redrawn_and_stays(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    terminal = terminal_of(monkeypatch)
    with counted("items", Line(clock=clock)) as report:
        for done in (1, 2, 3):
            clock.now += 1 if done < 3 else 0.01
            report(done, 3, "recall")
            if done == 2:
                say("a line between")
    between, bar = seen(terminal.getvalue())
    assert between == "a line between", "what is said stands above the bar, whole"
    assert bar.startswith("items ━")
    assert bar.endswith("3 of 3 (recall), 0:00:00 left")
    assert terminal.getvalue().rstrip().endswith("\x1b[?25h"), "the cursor is back"


def test_a_terminal_gets_its_cursor_back_from_a_command_that_fails(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    terminal = terminal_of(monkeypatch)

    def command() -> None:
        with counted("items", Line(clock=clock)) as report:
            clock.now += 1
            report(1, 3, "recall")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        command()
    assert terminal.getvalue().rstrip().endswith("\x1b[?25h")


def test_a_terminal_that_cannot_redraw_is_a_log(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    terminal = terminal_of(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    with counted("items", Line(clock=clock)) as report:
        clock.now += 31
        report(1, 3, "recall")
    assert terminal.getvalue() == "items: 1 of 3 (recall)\n"


def test_the_commands_write_it(
    demo_asset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(monkeypatch)
    monkeypatch.setattr("kvbridge.cli.progress.Line", lambda: Line(every_s=0))
    run_eval(
        EvalCommand(
            demo_asset, tmp_path, conditions=("native",), tasks=("recall",), limit=3, as_json=True
        )
    )
    shown = [line for line in log.getvalue().splitlines() if line.startswith("items: ")]
    assert [line.split(",")[0] for line in shown] == [
        f"items: {n} of 3 (recall)" for n in (1, 2, 3)
    ]
