"""How the receiver (or the sender) gets past a prompt: the conditions every number is compared across.

Conditions are routes × recomputed tails (`plans`), and four that have no tail of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from transformers import DynamicCache

from kvbridge.cache.prefill import capture, run_decoder
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.clock import Stopwatch
from kvbridge.errors import EvalError
from kvbridge.eval.conditions.plans import TAILS, check_names, named, parsed
from kvbridge.eval.conditions.setup import Setup
from kvbridge.eval.conditions.sharing import SharedTranslator
from kvbridge.eval.tasks.items import Item
from kvbridge.eval.tasks.start import Start, forward
from kvbridge.handoff.bridge import Bridge
from kvbridge.handoff.cost import forward_flops, prefill_flops
from kvbridge.handoff.result import Handoff
from kvbridge.model.model import Model


@dataclass(eq=False)
class Prompt:
    """One item's prompt for one setup, and what several conditions share: computed once, on first use."""

    setup: Setup
    item: Item
    donor: str
    tails: dict[int, Start] = field(default_factory=dict)

    @cached_property
    def ids(self) -> Tensor:
        """The receiver's tokens of the prompt, `[tokens]`."""
        return self.setup.receiver.encode(self.item.prompt).ids

    @cached_property
    def snapshot(self) -> KVSnapshot:
        """The sender's cache of the prompt."""
        return capture(self.setup.sender, self.item.prompt)

    @cached_property
    def wrong_snapshot(self) -> KVSnapshot:
        """Another document's sender cache, under this prompt's ids, spans and text digest: only its content tells."""
        ids, count = self.setup.sender.encode(self.donor).ids, len(self.snapshot)
        if len(ids) < count:
            raise EvalError(
                f"{self.item.id}: the other document has {len(ids)} tokens, {count} are needed"
            )
        other = capture(self.setup.sender, input_ids=ids[:count])
        layers = tuple(dict(layer) for layer in other.layers)
        return replace(self.snapshot, layers=layers)

    @cached_property
    def prefill_flops(self) -> int:
        """FLOPs of the receiver's own prefill."""
        return prefill_flops(self.setup.receiver.geometry, len(self.ids))


def native(prompt: Prompt) -> Start:
    """The receiver's own prefill."""
    return _prefill(prompt.setup.receiver, prompt.ids, share=1.0)


def sender(prompt: Prompt) -> Start:
    """Not switching: the sender goes on from its own cache; one token's work."""
    model, snapshot = prompt.setup.sender, prompt.snapshot
    cache = DynamicCache(
        [
            (x["k"][:-1].transpose(0, 1)[None], x["v"][:-1].transpose(0, 1)[None])
            for x in snapshot.layers
        ],
        config=model.model.config,
    )
    count = len(snapshot)
    watch = Stopwatch(model.device)
    logits = forward(model, snapshot.token_ids[None, -1:], cache, count - 1, keep=1)[0, -1].float()
    share = forward_flops(model.geometry, 1, count - 1, head=True) / prompt.prefill_flops
    return Start(model, logits, cache, count, watch.ms(), share)


def translated(prompt: Prompt, tail: int) -> Start:
    """The sender's cache through the translator; a prompt that the repair covers whole is a prefill."""
    return _handed(prompt, prompt.setup.bridge, prompt.snapshot, tail)


def wrong_document(prompt: Prompt, tail: int) -> Start:
    """Another document's cache through the translator: the right receiver features, sinks and tail."""
    return _handed(prompt, prompt.setup.bridge, prompt.wrong_snapshot, tail)


def token_only(prompt: Prompt, tail: int) -> Start:
    """The control map: receiver features alone."""
    return _handed(prompt, prompt.setup.control, prompt.snapshot, tail)


def tail_only(prompt: Prompt, tail: int) -> Start:
    """Sinks and the last `tail` tokens prefilled at their own positions; nothing translated. `no_context` is this with a
    tail of 1, and what two conditions share is prefilled once."""
    if tail not in prompt.tails:
        receiver, ids, sinks = prompt.setup.receiver, prompt.ids, prompt.setup.plan.sinks
        count, first = len(ids), max(0, len(ids) - tail)
        share = (
            forward_flops(receiver.geometry, min(sinks, first) + count - first, 0, head=True)
            / prompt.prefill_flops
        )
        prompt.tails[tail] = _prefill(
            receiver, ids, share=share, sinks=min(sinks, first), tail_from=first
        )
    return prompt.tails[tail]


def raw_sender(prompt: Prompt, tail: int) -> Start:
    """The sender's cache as it is, under the same repair; only where shapes and tokenizers agree."""
    bridge = prompt.setup.raw_bridge
    if bridge is None:
        raise EvalError("raw_sender needs equal shapes and tokenizers")
    return _handed(prompt, bridge, prompt.snapshot, tail)


def gated(prompt: Prompt) -> Start:
    """Translated behind the gate: a refusal is a prefill, with what all attempts cost on top. A gate calibrated for several
    repair plans climbs them as its thresholds expect."""
    setup, snapshot = prompt.setup, prompt.snapshot
    if setup.gated is None:
        raise EvalError("the condition gated needs a gate")
    if setup.ladder is None:
        return _handed(prompt, setup.gated, snapshot, setup.plan.tail)
    watch = Stopwatch(setup.receiver.device)
    handoff, rung = setup.ladder.climb(snapshot, prompt.item.prompt)
    return _went_on(prompt, handoff, watch, tail=rung.plan.tail)


Condition = Callable[[Prompt], Start]
Route = Callable[[Prompt, int], Start]


def _at(route: Route, tail: int) -> Condition:
    return lambda prompt: route(prompt, tail)


BY_TAIL: dict[str, Route] = {
    "translated": translated,
    "wrong_document": wrong_document,
    "token_only": token_only,
    "tail_only": tail_only,
    "raw_sender": raw_sender,
}
CONDITIONS: dict[str, Condition] = {
    "native": native,
    "sender": sender,
    "gated": gated,
    "no_context": _at(tail_only, 1),
    **{named(route, tail): _at(run, tail) for route, run in BY_TAIL.items() for tail in TAILS},
}


def condition(name: str) -> Condition:
    """The condition of a name in CONDITIONS, or of a route at another tail; raises EvalError."""
    check_names([name], CONDITIONS)
    route = parsed(name)
    return CONDITIONS[name] if route is None else _at(BY_TAIL[route[0]], route[1])


@torch.no_grad()
def _prefill(
    model: Model, ids: Tensor, *, share: float, sinks: int = 0, tail_from: int = 0
) -> Start:
    """A dense prefill of the sinks and of everything from `tail_from` on, each at its own position."""
    cache = DynamicCache(config=model.model.config)
    watch = Stopwatch(model.device)
    if sinks:
        run_decoder(model, ids[None, :sinks], cache=cache)
    logits = forward(model, ids[None, tail_from:], cache, tail_from, keep=1)[0, -1].float()
    return Start(model, logits, cache, len(ids), watch.ms(), share)


@torch.no_grad()
def _handed(prompt: Prompt, bridge: Bridge, snapshot: KVSnapshot, tail: int) -> Start:
    plan = replace(prompt.setup.plan, tail=tail)
    watch = Stopwatch(prompt.setup.receiver.device)
    handoff = bridge.handoff(snapshot, prompt.item.prompt, repair=plan)
    decision = handoff.decision
    if not decision.accepted and bridge.gate is None and decision.reason != "too_short":
        raise EvalError(f"{prompt.item.id}: {decision}")
    found = _went_on(prompt, handoff, watch)
    found.ttft_ms += _spared(bridge)
    return found


@torch.no_grad()
def _went_on(
    prompt: Prompt, handoff: Handoff, watch: Stopwatch, *, tail: int | None = None
) -> Start:
    """The receiver after a handoff, its first logits computed; `watch` runs since the handoff began."""
    receiver, cache, decision = prompt.setup.receiver, handoff.cache, handoff.decision
    logits = forward(receiver, handoff.remaining_ids, cache, handoff.cached, keep=1)[0, -1].float()
    spent = decision.predicted_flops or 0
    share = spent / prompt.prefill_flops + (0.0 if decision.accepted else 1.0)
    return Start(
        receiver,
        logits,
        cache,
        len(prompt.ids),
        watch.ms(),
        share,
        decision.verdict,
        decision.score,
        decision.reason,
        tail=tail,
    )


def _spared(bridge: Bridge) -> float:
    """Milliseconds of translation that an earlier condition paid for and this one needs as well."""
    translator = bridge.translator
    return translator.memory.taken() if isinstance(translator, SharedTranslator) else 0.0
