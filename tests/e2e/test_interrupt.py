"""Ctrl-C and SIGTERM, sent to real processes: one line says what is left and how to go on, and the
command that it names does."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbridge.cli.interrupt import Interrupted, Left, interruptible, leaving, left_fleet
from tests.e2e.test_cli import few
from tests.eval.conftest import demo_asset, demo_data

__all__ = ["demo_asset", "demo_data"]

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def start(*arguments: object, module: str = "kvbridge.cli.main") -> subprocess.Popen[str]:
    """A command in a process group of its own, as a terminal starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def interrupted(
    arguments: tuple[object, ...], when: Callable[[], bool], number: signal.Signals
) -> tuple[str, list[str]]:
    """Interrupts a command once `when` holds: the whole group, as Ctrl-C does, or the one process,
    as `kill` does. Gives its one line, and the words of the command that it names."""
    process = start(*arguments)
    deadline = time.monotonic() + 300
    try:
        while not when():
            assert process.poll() is None, process.communicate()[1][-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if number is signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == CODES[number], stderr[-2000:]
    assert "Traceback" not in stderr
    assert stdout == ""
    said = [line for line in stderr.splitlines() if line.startswith("kvbridge:")]
    assert said == stderr.splitlines()[-1:]
    command = shlex.split(said[0].rpartition(": ")[2])
    assert command == ["kvbridge", *map(str, arguments)]
    return said[0], command[1:]


def signal_myself() -> None:
    """SIGINT to this process, and time for it to arrive."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


def grown(path: Path, lines: int = 1) -> Callable[[], bool]:
    """Whether a file has more than so many lines."""
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= lines


@pytest.mark.parametrize("number", CODES)
def test_a_fit_keeps_nothing(number: signal.Signals, tmp_path: Path) -> None:
    out, began = tmp_path / "a b", time.monotonic()
    fit = ("fit", "demo:sender", "demo:receiver", "--out", out)
    line, _ = interrupted(fit, lambda: time.monotonic() - began > 8, number)
    assert f"nothing is kept in {out}" in line
    assert "begin again with: kvbridge fit" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "processes"), [(signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_an_evaluation_goes_on_from_its_rows(
    number: signal.Signals, processes: int, demo_asset: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "run" / "rows.jsonl"
    run: tuple[object, ...] = (
        "eval",
        "run",
        demo_asset,
        "--out",
        rows.parent,
        "--limit",
        12,
        "--tasks",
        "recall",
    )
    run = (*run, "--processes", processes)
    line, command = interrupted(run, grown(rows), number)
    kept = rows.read_bytes()
    count = kept.count(b"\n")
    assert f"kept in {rows.parent}: {count} rows; go on with:" in line
    going = start(*command)
    _, stderr = going.communicate(timeout=300)
    assert going.returncode == 0, stderr[-2000:]
    assert rows.read_bytes().startswith(kept)


def test_a_screening_counts_pairs(tmp_path: Path) -> None:
    out = tmp_path / "fleet"
    data = few(tmp_path / "data", documents=40)
    screen: tuple[object, ...] = (
        "screen",
        "demo:sender",
        "demo:receiver",
        "--data",
        data,
        "--out",
        out,
    )
    screen = (*screen, "--layers", 2, "--max-tokens", 64, "--items", 4)
    assets = out / "demo-sender__demo-receiver" / "asset"
    line, _ = interrupted(screen, assets.exists, signal.SIGINT)
    assert f"kept in {out}: 0 of 2 pairs finished, 1 translators, " in line
    (assets.parent / "summary.json").write_text("{}")
    (assets.parent / "rows.jsonl").write_text("{}\n{}\n{}\n")
    left = left_fleet(out, 2)
    assert left == Left(f"kept in {out}: 1 of 2 pairs finished, 1 translators, 3 rows", True)


def test_a_calibration_keeps_nothing(demo_asset: Path, tmp_path: Path) -> None:
    out, began = tmp_path / "gate", time.monotonic()
    line, _ = interrupted(
        ("gate", "calibrate", demo_asset, "--out", out),
        lambda: time.monotonic() - began > 6,
        signal.SIGINT,
    )
    assert f"nothing is kept in {out}, for a calibration is written whole" in line


def test_another_command_says_at_least_how_to_begin_again() -> None:
    with pytest.raises(Interrupted) as ended, interruptible():
        signal_myself()
    assert ended.value.code == 130
    assert ended.value.line(["kvbridge", "verify", "a b"]) == (
        "interrupted; the command did not finish; begin again with: kvbridge verify 'a b'"
    )


def test_signals_are_as_they_were_afterwards_and_ignored_ones_stay_so() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with interruptible():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(Interrupted), interruptible(), leaving(lambda: Left("inner")):
            signal_myself()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
