"""One stopwatch for all that is timed: a fit's parts, a handoff's stages, a gate's signals, a task's first token."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Time since construction. The devices are waited for when it starts and at every look.

    An accelerator works through a queue: without the wait, the time would be that of queueing the
    work and not of doing it. The CPU, or no device at all, needs no wait.
    """

    def __init__(self, *devices: torch.device) -> None:
        self._queued = [device for device in devices if device.type == "cuda"]
        self._wait()
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Seconds so far; it runs on."""
        self._wait()
        return time.perf_counter() - self._start

    def ms(self) -> float:
        """Milliseconds so far; it runs on."""
        return 1000 * self.seconds()

    def _wait(self) -> None:
        for device in self._queued:
            torch.cuda.synchronize(device)
