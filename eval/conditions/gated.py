"""Translated behind the gate: a refusal is a prefill, with what all attempts cost on top."""

from __future__ import annotations

from kvbridge.clock import Stopwatch
from kvbridge.errors import EvalError
from kvbridge.eval.conditions.base import Condition
from kvbridge.eval.conditions.handed import handed, went_on
from kvbridge.eval.conditions.prompt import Prompt
from kvbridge.eval.tasks.start import Start


def _run(prompt: Prompt, _: int) -> Start:
    """A gate calibrated for several repair plans climbs them as its thresholds expect."""
    setup = prompt.setup
    if setup.gated is None:
        raise EvalError("the condition gated needs a gate")
    if setup.ladder is None:
        return handed(prompt, setup.gated, prompt.snapshot, setup.plan.tail)
    watch = Stopwatch(setup.receiver.device)
    handoff, rung = setup.ladder.climb(prompt.snapshot, prompt.item.prompt)
    return went_on(prompt, handoff, watch, rung.plan.tail)


GATED = Condition(
    name="gated",
    label="Behind the gate",
    role="subject",
    run=_run,
    order=3,
    beside=("translated",),
    available=lambda setup: setup.gated is not None,
)
