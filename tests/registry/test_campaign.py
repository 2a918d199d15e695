"""A short SIGKILL campaign; docs/registry-faults.md has the long one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.faults.campaign import campaign


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kills_at_random_points(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    report = campaign(
        40, seed=7, folder=Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    )
    assert report.kills.total() >= 40
