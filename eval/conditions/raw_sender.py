"""The sender's cache as it is, under the same repair; only where shapes and tokenizers agree."""

from __future__ import annotations

from kvbridge.errors import EvalError
from kvbridge.eval.conditions.base import Condition
from kvbridge.eval.conditions.handed import handed
from kvbridge.eval.conditions.prompt import Prompt
from kvbridge.eval.tasks.start import Start


def _run(prompt: Prompt, tail: int) -> Start:
    bridge = prompt.setup.raw_bridge
    if bridge is None:
        raise EvalError("raw_sender needs equal shapes and tokenizers")
    return handed(prompt, bridge, prompt.snapshot, tail)


RAW_SENDER = Condition(
    name="raw_sender",
    label="Sender's cache, raw",
    role="reference",
    run=_run,
    order=8,
    by_tail=True,
    available=lambda setup: setup.raw_bridge is not None,
)
