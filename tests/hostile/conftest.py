"""A fresh sound asset per test, and a guard on memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.forge import saved

ALLOWED_KIB = 320 << 10


@pytest.fixture
def asset(tmp_path: Path) -> Path:
    """The folder of a sound asset."""
    return saved(tmp_path / "asset")


@pytest.fixture(autouse=True)
def _bounded_memory() -> Iterator[None]:
    """Whatever a file claims, reading it takes no more memory than a few times its size (measured
    where Linux tells)."""
    reset = Path("/proc/self/clear_refs")
    try:
        reset.write_text("5")
    except OSError:
        yield
        return
    before = _peak_kib()
    yield
    grown = _peak_kib() - before
    assert grown < ALLOWED_KIB, f"memory grew by {grown} KiB"


def _peak_kib() -> int:
    """The process's peak resident memory since the last reset."""
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])
