"""How the receiver (or the sender) gets past a prompt: the conditions every number is compared across."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvbridge.bridge import Bridge, Gate
from kvbridge.cost import forward_flops, prefill_flops
from kvbridge.errors import EvalError
from kvbridge.eval.items import Item
from kvbridge.eval.start import Start, Stopwatch, forward
from kvbridge.fitting.families.full_head import full_head
from kvbridge.handoff import Handoff
from kvbridge.models import Model
from kvbridge.prefill import capture
from kvbridge.repair import RepairPlan
from kvbridge.snapshot import KVSnapshot
from kvbridge.translator import GroupMap, Translator


@dataclass(frozen=True, eq=False)
class Setup:
    """Models, translator and control of one pair, shared by all items. `plan` is the repair that every condition
    gets; conditions named …32 get its `tail` raised to 32."""

    sender: Model
    receiver: Model
    bridge: Bridge
    control: Bridge
    gated: Bridge | None = None
    plan: RepairPlan = field(default_factory=RepairPlan)

    @classmethod
    def of(
        cls,
        asset: Any,
        controls: Translator,
        sender: Model,
        receiver: Model,
        *,
        gate: Gate | None = None,
        plan: RepairPlan | None = None,
    ) -> Setup:
        """From an asset (or translator) and its control map."""
        return cls(
            sender,
            receiver,
            Bridge(asset, sender=sender, receiver=receiver),
            Bridge(controls, sender=sender, receiver=receiver),
            None if gate is None else Bridge(asset, sender=sender, receiver=receiver, gate=gate),
            plan or RepairPlan(),
        )

    @property
    def raw_bridge(self) -> Bridge | None:
        """The sender's cache taken as it is (content space, so positions stay right), where shapes and tokens agree."""
        return _raw_bridge(self)


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
            raise EvalError(f"{self.item.id}: the other document has {len(ids)} tokens, {count} are needed")
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
        [(x["k"][:-1].transpose(0, 1)[None], x["v"][:-1].transpose(0, 1)[None]) for x in snapshot.layers],
        config=model.model.config,
    )
    count = len(snapshot)
    watch = Stopwatch(model)
    logits = forward(model, snapshot.token_ids[None, -1:], cache, count - 1, keep=1)[0, -1].float()
    share = forward_flops(model.geometry, 1, count - 1, head=True) / prompt.prefill_flops
    return Start(model, logits, cache, count, watch.ms(), share)


def translated(tail: int) -> Callable[[Prompt], Start]:
    """The sender's cache through the translator; a prompt that the repair covers whole is a prefill."""
    return lambda prompt: _handed(prompt, prompt.setup.bridge, prompt.snapshot, tail)


def wrong_document(prompt: Prompt) -> Start:
    """Another document's cache through the translator: the right receiver features, sinks and tail."""
    return _handed(prompt, prompt.setup.bridge, prompt.wrong_snapshot, 1)


def token_only(prompt: Prompt) -> Start:
    """The control map: receiver features alone."""
    return _handed(prompt, prompt.setup.control, prompt.snapshot, 1)


def tail_only(tail: int) -> Callable[[Prompt], Start]:
    """Sinks and the last `tail` tokens prefilled at their own positions; nothing translated. `no_context` is this with a
    tail of 1, and what two conditions share is prefilled once."""

    def run(prompt: Prompt) -> Start:
        if tail not in prompt.tails:
            prompt.tails[tail] = prefill_tail(prompt)
        return prompt.tails[tail]

    def prefill_tail(prompt: Prompt) -> Start:
        receiver, ids, sinks = prompt.setup.receiver, prompt.ids, prompt.setup.plan.sinks
        count, first = len(ids), max(0, len(ids) - tail)
        share = forward_flops(receiver.geometry, min(sinks, first) + count - first, 0, head=True) / prompt.prefill_flops
        return _prefill(receiver, ids, share=share, sinks=min(sinks, first), tail_from=first)

    return run


def raw_sender(prompt: Prompt) -> Start:
    """The sender's cache as it is, under the same repair; only where shapes and tokenizers agree."""
    bridge = prompt.setup.raw_bridge
    if bridge is None:
        raise EvalError("raw_sender needs equal shapes and tokenizers")
    return _handed(prompt, bridge, prompt.snapshot, 1)


def gated(prompt: Prompt) -> Start:
    """Translated behind the gate: a refusal is a prefill, with what the attempt cost on top."""
    if prompt.setup.gated is None:
        raise EvalError("the condition gated needs a gate")
    return _handed(prompt, prompt.setup.gated, prompt.snapshot, prompt.setup.plan.tail)


Condition = Callable[[Prompt], Start]
CONDITIONS: dict[str, Condition] = {
    "native": native,
    "sender": sender,
    "translated": translated(1),
    "translated_tail32": translated(32),
    "no_context": tail_only(1),
    "wrong_document": wrong_document,
    "token_only": token_only,
    "tail_only": tail_only(1),
    "tail_only32": tail_only(32),
    "raw_sender": raw_sender,
    "gated": gated,
}
DEFAULT = (
    "native",
    "sender",
    "translated",
    "translated_tail32",
    "no_context",
    "wrong_document",
    "token_only",
    "tail_only",
    "tail_only32",
)


@torch.no_grad()
def _prefill(model: Model, ids: Tensor, *, share: float, sinks: int = 0, tail_from: int = 0) -> Start:
    """A dense prefill of the sinks and of everything from `tail_from` on, each at its own position."""
    cache = DynamicCache(config=model.model.config)
    watch = Stopwatch(model)
    if sinks:
        forward(model, ids[None, :sinks], cache, 0, keep=1)
    logits = forward(model, ids[None, tail_from:], cache, tail_from, keep=1)[0, -1].float()
    return Start(model, logits, cache, len(ids), watch.ms(), share)


@torch.no_grad()
def _handed(prompt: Prompt, bridge: Bridge, snapshot: KVSnapshot, tail: int) -> Start:
    receiver = prompt.setup.receiver
    plan = replace(prompt.setup.plan, tail=tail)
    watch = Stopwatch(receiver)
    handoff: Handoff = bridge.handoff(snapshot, prompt.item.prompt, repair=plan)
    cache = handoff.cache
    logits = forward(receiver, handoff.remaining_ids, cache, handoff.cached, keep=1)[0, -1].float()
    ms = watch.ms()
    decision = handoff.decision
    if not decision.accepted and bridge.gate is None and decision.reason != "too_short":
        raise EvalError(f"{prompt.item.id}: {decision}")
    spent = decision.predicted_flops or 0
    share = spent / prompt.prefill_flops + (0.0 if decision.accepted else 1.0)
    return Start(receiver, logits, cache, len(prompt.ids), ms, share, decision.verdict, decision.score, decision.reason)


def _raw_bridge(setup: Setup) -> Bridge | None:
    ours, theirs = setup.sender.geometry, setup.receiver.geometry
    shapes = [tuple((s.heads, s.width) for s in layer.streams) for layer in ours.layers]
    if ours.tokenizer_digest != theirs.tokenizer_digest or shapes != [
        tuple((s.heads, s.width) for s in layer.streams) for layer in theirs.layers
    ]:
        return None
    maps = {}
    for index, layer in enumerate(theirs.layers):
        for stream in layer.streams:
            (group,) = full_head(ours, theirs, index, stream.name, (index,))
            eye = torch.eye(stream.features)
            maps[index, stream.name] = (GroupMap(group.heads, group.blocks, False, eye, torch.zeros(stream.features)),)
    translator = Translator(ours, theirs, "identity", "none", maps)
    return Bridge(translator, sender=setup.sender, receiver=setup.receiver)
