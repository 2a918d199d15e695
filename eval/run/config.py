"""What is asked of an evaluation run, apart from its pair, its items and its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvbridge.handoff.plan import RepairPlan
from kvbridge.handoff.ports import Gate

ItemProgress = Callable[[int, int, str], None]
"""Told of every item that is done: its number, how many there are, its task."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How a run is made.

    `command` is what made it, for the report; `conditions` those to run (None: all that the pair
    allows). `gate` and `plan` are the gate behind `gated` and the repair of every condition,
    `controls` a folder of the control map that is not beside its asset. `processes` share the
    items, each with its own models and one thread (on the CPU, without a gate). `predictors` is
    what was known of the pair before fitting. `data`, a digest of the texts that the items are
    from, refuses to continue a run of other texts.
    """

    command: str = ""
    conditions: Sequence[str] | None = None
    gate: Gate | None = None
    plan: RepairPlan | None = None
    controls: Path | None = None
    progress: ItemProgress | None = None
    processes: int = 1
    predictors: Mapping[str, float] = field(default_factory=dict)
    data: str | None = None
