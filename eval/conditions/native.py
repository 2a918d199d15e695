"""The receiver's own prefill: the ceiling."""

from __future__ import annotations

from kvbridge.eval.conditions.base import Condition
from kvbridge.eval.conditions.prompt import Prompt
from kvbridge.eval.tasks.start import Start, prefilled


def _run(prompt: Prompt, _: int) -> Start:
    return prefilled(prompt.setup.receiver, prompt.ids, share=1.0)


NATIVE = Condition(
    name="native", label="Receiver's own prefill", role="denominator", run=_run, order=0
)
