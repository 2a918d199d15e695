"""The one stopwatch: units, and that a device's queue is waited for."""

from __future__ import annotations

import pytest
import torch

from kvbridge import clock
from kvbridge.clock import Stopwatch


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Time that moves a quarter of a second a look, and the devices that were waited for."""
    devices: list[torch.device] = []
    ticks = iter(range(100))
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(ticks) / 4)
    monkeypatch.setattr(torch.cuda, "synchronize", devices.append)
    return devices


def test_seconds_and_milliseconds_since_construction(waited: list[torch.device]) -> None:
    watch = Stopwatch()
    assert watch.seconds() == 0.25
    assert watch.ms() == 500
    assert not waited


def test_an_accelerator_is_waited_for_at_the_start_and_at_every_look(
    waited: list[torch.device],
) -> None:
    device = torch.device("cuda", 1)
    watch = Stopwatch(torch.device("cpu"), device)
    assert waited == [device]
    watch.ms()
    assert waited == [device, device]
