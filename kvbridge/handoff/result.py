"""What a handoff gives back: a decision, where every cached value is from, and a cache to go on
from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from kvbridge.cache.provenance import Provenance
from kvbridge.cache.snapshot import KVSnapshot, LayerKV, build_cache
from kvbridge.engines.port import Engine, Prefilled
from kvbridge.engines.snapshots import snapshot_of
from kvbridge.engines.transformers import engine_of
from kvbridge.errors import UsageError
from kvbridge.handoff.decision import Decision
from kvbridge.model.arguments import expect
from kvbridge.model.model import Model


@dataclass(frozen=True, eq=False)
class Handoff:
    """The receiver's state at the end of a prompt. `receiver` is the model or engine that the
    bridge was given, `ids` `[tokens]` the whole prompt in its tokens; `layers[i][stream]` `[cached,
    heads, width]` as cached, None after a refusal (then nothing is cached).
    """

    decision: Decision
    provenance: Provenance
    receiver: Any
    ids: Tensor
    layers: list[LayerKV] | None
    cached: int

    @property
    def engine(self) -> Engine:
        """What runs the receiver."""
        return engine_of(self.receiver)

    @property
    def prefilled(self) -> Prefilled:
        """The same as an engine goes on from it."""
        return Prefilled(self.ids, self.layers, self.provenance)

    @property
    def cache(self) -> DynamicCache:
        """A fresh transformers cache over the first `cached` tokens, empty after a refusal; growing
        it leaves this handoff as it was. Raises UsageError where the receiver is no transformers
        model."""
        if not isinstance(self.receiver, Model):
            raise UsageError(
                f"{self.engine.name} has no transformers cache; go on from `layers` with its engine"
            )
        if self.layers is None:
            return DynamicCache(config=self.receiver.model.config)
        return build_cache(self.receiver, self.layers, self.provenance)

    @property
    def remaining_ids(self) -> Tensor:
        """Prompt tokens that are not cached, `[1, n]` (the whole prompt after a refusal; n ≥ 1
        unless it is empty): feed them with `cache` to get the next token's logits."""
        return self.ids[None, self.cached :].to(self.receiver.device)

    def generate(self, max_new_tokens: int | None = None, **generate_kwargs: Any) -> Tensor:
        """The receiver's generation from here: returns prompt and continuation, `[sequences,
        tokens]`.

        Of a transformers model this is `transformers.generate`. `max_new_tokens` is 64 unless it,
        `max_length=` or the length of a `generation_config=` says otherwise. Every generate
        argument passes through (streamer, sampling, stopping, beams, …). After a refusal this is
        plain dense generation. Can be called again: the handoff is not modified. Raises UsageError
        on an empty prompt.
        """
        return self.engine.generate(self.prefilled, max_new_tokens, **generate_kwargs)

    def text(self, max_new_tokens: int | None = None, **generate_kwargs: Any) -> str:
        """The continuation alone, decoded; arguments as of `generate`.

        One continuation: raises UsageError where more than one would be returned. What else a
        `return_dict_in_generate=True` returns is dropped.
        """
        out = self.generate(max_new_tokens, **generate_kwargs)
        sequences = getattr(out, "sequences", out)
        if len(sequences) != 1:
            raise UsageError(
                f"text gives one continuation, found {len(sequences)}; leave num_return_sequences "
                "out, or decode what generate returns"
            )
        return self.engine.spell(sequences[0, len(self.ids) :])

    def snapshot(self) -> KVSnapshot:
        """The handed-over cache as a snapshot (a copy) that keeps its provenance: another handoff
        refuses a translated one."""
        if self.layers is None:
            raise UsageError("a refused handoff has no cache; capture the receiver instead")
        copies = [{name: t.clone() for name, t in layer.items()} for layer in self.layers]
        return snapshot_of(self.engine, self.ids, copies, self.provenance)


def generate_many(
    handoffs: Sequence[Handoff], max_new_tokens: int | None = None, **generate_kwargs: Any
) -> list[Tensor]:
    """Continues several handoffs of one receiver in one batch, padded on the left; refused ones go
    one by one. Lengths as of `Handoff.generate`; `max_length=` would count the padding and is
    refused.

    Returns prompt and continuation `[tokens]` per handoff, padding removed from the left. One
    sequence each: raises UsageError where generate would return more, or something else than
    tokens.
    """
    for handoff in expect(handoffs, Sequence, "a list of handoffs"):
        expect(handoff, Handoff, "a list of handoffs")
    if not handoffs:
        return []
    ready = [handoff for handoff in handoffs if handoff.layers is not None]
    first = (ready or handoffs)[0]
    if any(handoff.receiver is not first.receiver for handoff in ready):
        raise UsageError("generate_many continues handoffs of one receiver only")
    together = [h.prefilled for h in handoffs if h.receiver is first.receiver]
    continued = iter(first.engine.generate_many(together, max_new_tokens, **generate_kwargs))
    return [
        next(continued)
        if handoff.receiver is first.receiver
        else handoff.generate(max_new_tokens, **generate_kwargs)[0]
        for handoff in handoffs
    ]
