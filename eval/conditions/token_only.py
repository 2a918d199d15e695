"""The control map: the same receiver features without any sender block. What a translation adds
starts there."""

from __future__ import annotations

from kvbridge.eval.conditions.base import TAILS, Condition
from kvbridge.eval.conditions.handed import handed
from kvbridge.eval.conditions.prompt import Prompt
from kvbridge.eval.tasks.start import Start


def _run(prompt: Prompt, tail: int) -> Start:
    return handed(prompt, prompt.setup.control, prompt.snapshot, tail)


TOKEN_ONLY = Condition(
    name="token_only",
    label="Token-only map",
    phrase="token-only",
    role="control",
    run=_run,
    order=6,
    by_tail=True,
    tails=TAILS,
)
