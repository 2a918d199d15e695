"""What a calibration is asked for, and the splits its documents fall into."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from kvbridge.errors import UsageError, unknown_names
from kvbridge.format import MAX_RUNGS
from kvbridge.gates.decide.guarantee import check_levels
from kvbridge.gates.labels import LABELS
from kvbridge.gates.signals import DEFAULT_SIGNALS, SIGNALS
from kvbridge.geometry import hash_draw
from kvbridge.handoff.plan import RepairPlan

CALIBRATION_SPLITS = {"statistics": 0.1, "score": 0.3, "thresholds": 0.4, "report": 0.2}


@dataclass(frozen=True)
class GateConfig:
    """What a calibration is asked for. `alpha`: risk of `use`, `lenient_alpha` of `use` and
    `use_approximate` together, each at confidence 1 − `delta`; `label`, `tau`: what counts as
    damage; `plans`: the repair ladder, cheapest first."""

    label: str = "next_token"
    tau: float | None = None
    alpha: float = 0.02
    lenient_alpha: float = 0.1
    delta: float = 0.05
    plans: tuple[RepairPlan, ...] = (RepairPlan(tail=17),)
    signals: tuple[str, ...] = DEFAULT_SIGNALS

    def __post_init__(self) -> None:
        check_levels(self.alpha, self.delta)
        check_levels(self.lenient_alpha, self.delta)
        if self.label not in LABELS:
            raise UsageError(unknown_names("a label", [self.label], LABELS))
        if self.tau is not None and not 0 <= self.tau <= 1e6:
            raise UsageError(f"expected tau from 0 to 1e6, found {self.tau}")
        unknown = [s for s in self.signals if s not in SIGNALS]
        if unknown or not self.signals:
            raise UsageError(unknown_names("signals", unknown, SIGNALS))
        if len(set(self.signals)) != len(self.signals):
            raise UsageError(f"expected each signal once, found {', '.join(self.signals)}")
        if not 1 <= len(self.plans) <= MAX_RUNGS or len(set(self.plans)) != len(self.plans):
            raise UsageError(
                f"expected 1 to {MAX_RUNGS} different repair plans, found {str(self.plans)[:200]}"
            )
        for one, other in pairwise(self.plans):
            if replace(one, tail=other.tail) == other and other.tail < one.tail:
                raise UsageError(
                    "expected repair plans cheapest first, "
                    f"found tail {one.tail} before tail {other.tail}"
                )
        if self.alpha > self.lenient_alpha:
            raise UsageError(
                f"expected alpha ≤ lenient_alpha, found {self.alpha} and {self.lenient_alpha}"
            )

    @property
    def limit(self) -> float:
        """τ, or the label's own."""
        return LABELS[self.label].limit(self.tau)


def split_of(document: str) -> str:
    """The split a document is in, drawn by a hash of its name: the same on every machine."""
    # Another draw than a fit's, which is of the name alone: the two need not agree in anything.
    draw = hash_draw(f"gate/{document}")
    for split, share in CALIBRATION_SPLITS.items():
        draw -= share
        if draw < 0:
            return split
    return "report"  # the shares add up to a hair less than 1
