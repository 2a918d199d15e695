"""The sender's cache through the translator; a prompt that the repair covers whole is a prefill."""

from __future__ import annotations

from kvbridge.eval.conditions.base import TAILS, Condition
from kvbridge.eval.conditions.handed import handed
from kvbridge.eval.conditions.prompt import Prompt
from kvbridge.eval.tasks.start import Start


def _run(prompt: Prompt, tail: int) -> Start:
    return handed(prompt, prompt.setup.bridge, prompt.snapshot, tail)


TRANSLATED = Condition(
    name="translated",
    label="Translated",
    role="subject",
    run=_run,
    order=2,
    by_tail=True,
    tails=TAILS,
)
