"""Progress where nobody watches a terminal: a log has a plain line now and then, with what is done and what is left."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from kvbridge.cli.progress import Line, counted, progress_of
from kvbridge.cli.run import run_eval
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
    report = counted("items", Line(clock=clock))
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
    report = counted("items", Line(clock=clock))
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
    report = progress_of("fit", Line(clock=clock))
    for second in range(1, 36):
        clock.now += 1
        report("sender", 1000, float(second))
    assert log.getvalue() == "fit: sender 30,000 tokens (1,000 sender tokens/s)\n"


def test_a_terminal_has_one_line_that_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, clock = Stream(terminal=True), Clock()
    monkeypatch.setattr(sys, "stderr", stream)
    report = counted("items", Line(clock=clock))
    for done in (1, 2, 3):
        clock.now += 1 if done < 3 else 0.01
        report(done, 3, "recall")
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().count("\r") == 3
    assert stream.getvalue().rstrip().endswith("3 of 3 (recall), 0:00:00 left")


def test_the_commands_write_it(
    demo_asset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(monkeypatch)
    monkeypatch.setattr("kvbridge.cli.progress.Line", lambda: Line(every_s=0))
    run_eval(
        demo_asset,
        None,
        tmp_path,
        ("native",),
        ("recall",),
        3,
        None,
        None,
        (None, None),
        "cpu",
        1,
        True,
    )
    shown = [line for line in log.getvalue().splitlines() if line.startswith("items: ")]
    assert [line.split(",")[0] for line in shown] == [
        f"items: {n} of 3 (recall)" for n in (1, 2, 3)
    ]
