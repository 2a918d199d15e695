"""Where a fit's time and memory go."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds per named part and tokens per model, on the devices that take part."""

    def __init__(self, *devices: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self.tokens: dict[str, int] = {}
        self._cuda = [d for d in devices if d.type == "cuda"]
        self._start = time.perf_counter()

    @contextmanager
    def part(self, name: str, *, tokens: int = 0) -> Iterator[None]:
        """Adds the block's wall time (and tokens) to `name`, waiting for the devices."""
        start = time.perf_counter()
        try:
            yield
        finally:
            for device in self._cuda:
                torch.cuda.synchronize(device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self.tokens[name] = self.tokens.get(name, 0) + tokens

    def timings(self) -> dict[str, float]:
        """Seconds per part, tokens and tokens/s of both models, the total, its ratio to the two forward passes, and
        peak bytes (of the accelerators where there are any, else of this process)."""
        total = time.perf_counter() - self._start
        names = ("forward_sender", "forward_receiver", "moments", "solve", "scores")
        found = {f"{name}_s": self.seconds.get(name, 0.0) for name in names}
        forward = found["forward_sender_s"] + found["forward_receiver_s"]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self._cuda:
            peak = max(torch.cuda.max_memory_allocated(d) for d in self._cuda)
        for side in ("sender", "receiver"):
            tokens = self.tokens.get(f"forward_{side}", 0)
            found |= {
                f"{side}_tokens": float(tokens),
                f"{side}_tokens_per_s": tokens / max(found[f"forward_{side}_s"], 1e-9),
            }
        return {
            **found,
            "total_s": total,
            "ratio_to_forward": total / max(forward, 1e-9),
            "peak_bytes": float(peak),
        }
