"""Sinks and the last tokens prefilled at their own positions, nothing translated; with the last
token alone there is no context."""

from __future__ import annotations

from kvbridge.eval.conditions.base import TAILS, Condition
from kvbridge.eval.conditions.prompt import Prompt
from kvbridge.eval.tasks.start import Start, prefilled
from kvbridge.handoff.cost import forward_flops


def _run(prompt: Prompt, tail: int) -> Start:
    """What two conditions share, `no_context` and this at tail 1, is prefilled once."""
    if tail not in prompt.dense_tails:
        receiver, ids = prompt.setup.receiver, prompt.ids
        first = max(0, len(ids) - tail)
        sinks = min(prompt.setup.plan.sinks, first)
        flops = forward_flops(receiver.geometry, sinks + len(ids) - first, 0, head=True)
        share = flops / prompt.prefill_flops
        start = prefilled(receiver, ids, share=share, sinks=sinks, tail_from=first)
        start.tail = tail
        prompt.dense_tails[tail] = start
    return prompt.dense_tails[tail]


TAIL_ONLY = Condition(
    name="tail_only",
    label="Tail only",
    label_at="Tail {tail} only",
    phrase="the tail alone",
    role="control",
    run=_run,
    order=7,
    by_tail=True,
    tails=TAILS,
    suffix="",
    # One token says no more than no context does.
    screened_tail=32,
)
NO_CONTEXT = Condition(
    name="no_context",
    label="No context",
    role="floor",
    run=lambda prompt, _: _run(prompt, 1),
    order=4,
)
