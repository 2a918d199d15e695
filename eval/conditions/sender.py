"""Not switching: the sender goes on from its own cache, at the cost of one token."""

from __future__ import annotations

from transformers import DynamicCache

from kvbridge.clock import Stopwatch
from kvbridge.eval.conditions.base import Condition
from kvbridge.eval.conditions.prompt import Prompt
from kvbridge.eval.tasks.start import Start, forward
from kvbridge.handoff.cost import forward_flops


def _run(prompt: Prompt, _: int) -> Start:
    model, snapshot = prompt.setup.sender, prompt.snapshot
    # All but the last token, whose forward gives the first logits: `[1, heads, tokens, width]`
    # each.
    rows = [
        (layer["k"][:-1].transpose(0, 1)[None], layer["v"][:-1].transpose(0, 1)[None])
        for layer in snapshot.layers
    ]
    cache = DynamicCache(rows, config=model.model.config)
    count = len(snapshot)
    watch = Stopwatch(model.device)
    logits = forward(model, snapshot.token_ids[None, -1:], cache, count - 1, keep=1)[0, -1].float()
    share = forward_flops(model.geometry, 1, count - 1, head=True) / prompt.prefill_flops
    return Start(model, logits, cache, count, watch.ms(), share)


SENDER = Condition(
    name="sender",
    label="Sender, no switch",
    role="denominator",
    run=_run,
    order=1,
    own_tokens=False,
)
