"""Where a fit's time and memory go."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvbridge.clock import Stopwatch


class Clock:
    """Seconds per named part and tokens per model, on the devices that take part."""

    def __init__(self, *devices: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self.tokens: dict[str, int] = {}
        self._devices = devices
        self._total = Stopwatch(*devices)

    @contextmanager
    def part(self, name: str, *, tokens: int = 0) -> Iterator[None]:
        """Adds the block's wall time (and tokens) to `name`, waiting for the devices."""
        watch = Stopwatch(*self._devices)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + watch.seconds()
            self.tokens[name] = self.tokens.get(name, 0) + tokens

    def timings(self) -> dict[str, float]:
        """Seconds per part, tokens and tokens/s of both models, the total, its ratio to the two
        forward passes, and peak bytes (of the accelerators where there are any, else of this
        process)."""
        total = self._total.seconds()
        names = ("forward_sender", "forward_receiver", "moments", "solve", "scores")
        timings = {f"{name}_s": self.seconds.get(name, 0.0) for name in names}
        forward = timings["forward_sender_s"] + timings["forward_receiver_s"]
        for side in ("sender", "receiver"):
            tokens = self.tokens.get(f"forward_{side}", 0)
            seconds = max(timings[f"forward_{side}_s"], 1e-9)
            timings[f"{side}_tokens"] = float(tokens)
            timings[f"{side}_tokens_per_s"] = tokens / seconds
        timings["total_s"] = total
        timings["ratio_to_forward"] = total / max(forward, 1e-9)
        timings["peak_bytes"] = float(self._peak_bytes())
        return timings

    def _peak_bytes(self) -> int:
        accelerators = [device for device in self._devices if device.type == "cuda"]
        if accelerators:
            return max(torch.cuda.max_memory_allocated(device) for device in accelerators)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
