"""What a tenant allows, and the switch with which operators end all use."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvbridge.errors import UsageError


@dataclass(frozen=True)
class Policy:
    """What one tenant allows. `enabled`: off means every handoff is a prefill. `shadow`: decide and
    log, always prefill. `strict_only`: nothing below `use`. `timeout_ms`: for all signals of one
    decision. `valid_until`: seconds since 1970 after which the calibration counts as stale. None:
    no limit.
    """

    enabled: bool = True
    shadow: bool = False
    strict_only: bool = False
    timeout_ms: float | None = None
    valid_until: float | None = None

    def __post_init__(self) -> None:
        if self.timeout_ms is not None and (
            type(self.timeout_ms) not in (int, float) or not self.timeout_ms > 0
        ):
            raise UsageError(
                f"expected timeout_ms as a number above 0 or None, found {self.timeout_ms!r:.40}"
            )
        until = self.valid_until
        if until is not None and (type(until) not in (int, float) or not math.isfinite(until)):
            raise UsageError(
                "expected valid_until as a finite number of seconds since 1970 or None, "
                f"found {until!r:.40}"
            )


def file_switch(path: str | Path) -> Callable[[], bool]:
    """A kill switch for operators: on as long as nothing stands at `path`, not even a dangling
    link. It raises OSError where that cannot be told, which switches off."""

    def on() -> bool:
        try:
            os.lstat(path)
        except FileNotFoundError:
            return True
        return False

    return on
