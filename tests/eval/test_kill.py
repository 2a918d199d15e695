"""`kvbridge eval run` and `kvbridge screen` as real processes, killed without warning: what stands
is kept, each row once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbridge.eval.conditions.names import defaults

ITEMS = 8
TIMED = ("ttft_ms", "ttft_ms_ci")


def start(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvbridge.cli.main", *map(str, arguments)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def finish(*arguments: object) -> None:
    process = start(*arguments)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said.decode()[-2000:]


def killed(arguments: tuple[object, ...], rows: Path, more: int, pause_s: float) -> None:
    """Kills the command once it has written `more` bytes to `rows` and `pause_s` seconds have
    passed."""
    before = rows.stat().st_size if rows.exists() else 0
    process = start(*arguments)
    try:
        deadline = time.monotonic() + 300
        while process.poll() is None and (not rows.exists() or rows.stat().st_size < before + more):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(pause_s)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL, "the command ended before it was killed"


def untimed(value: Any) -> Any:
    """JSON without what is measured by a clock."""
    if isinstance(value, dict):
        return {k: untimed(v) for k, v in value.items() if k not in TIMED}
    return value


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    if isinstance(value, (dict, list)):
        for key, inner in pairs:
            yield from flat(inner, f"{name}/{key}")
    else:
        yield name, value


def same(left: Any, right: Any) -> None:
    one, other = dict(flat(untimed(left))), dict(flat(untimed(right)))
    assert one.keys() == other.keys()
    for name, value in one.items():
        exact = value is None or isinstance(value, (str, bool))
        assert value == (
            other[name] if exact else pytest.approx(other[name], rel=1e-4, abs=1e-5)
        ), name


def test_a_killed_evaluation_continues_to_the_same_summary(
    demo_asset: Path, tmp_path: Path
) -> None:
    run = ("eval", "run", demo_asset, "--limit", ITEMS, "--tasks", "recall", "--out")
    finish(*run, tmp_path / "whole")
    rows, rng = tmp_path / "cut" / "rows.jsonl", random.Random(5)
    for more in (1, 7000, 12000):
        killed((*run, tmp_path / "cut"), rows, more, rng.uniform(0, 0.05))
        assert rows.read_bytes().count(b"\n") < ITEMS * len(defaults())
    finish(*run, tmp_path / "cut")
    written = [json.loads(line) for line in rows.read_text("utf-8").splitlines()]
    keys = {(row["item"], row["condition"]) for row in written}
    assert len(keys) == len(written) == ITEMS * len(defaults())
    same(
        *(
            json.loads((tmp_path / name / "summary.json").read_text("utf-8"))
            for name in ("cut", "whole")
        )
    )


def test_a_killed_screening_continues_to_the_same_table(demo_data: Path, tmp_path: Path) -> None:
    run = (
        "screen",
        "demo:sender",
        "demo:receiver",
        "--data",
        demo_data,
        "--items",
        4,
        "--layers",
        1,
        "--max-tokens",
        64,
        "--no-latency",
        "--out",
    )
    finish(*run, tmp_path / "whole")
    rows = [
        Path(f"demo-{a}__demo-{b}") / "rows.jsonl"
        for a, b in (("sender", "receiver"), ("receiver", "sender"))
    ]
    killed((*run, tmp_path / "cut"), tmp_path / "cut" / rows[1], 1, 0.01)
    finish(*run, tmp_path / "cut")
    for path in rows:
        lines = (tmp_path / "cut" / path).read_text("utf-8").splitlines()
        keys = {(r["item"], r["condition"]) for r in map(json.loads, lines)}
        assert len(keys) == len(lines) == 4 * len(defaults())
    same(
        *(
            json.loads((tmp_path / name / "screening.json").read_text("utf-8"))
            for name in ("cut", "whole")
        )
    )
