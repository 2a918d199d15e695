"""What a handoff gives back: a decision, where every cached value is from, and a cache to go on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvbridge.cache.provenance import Provenance
from kvbridge.cache.snapshot import KVSnapshot, LayerKV, build_cache
from kvbridge.errors import UsageError
from kvbridge.handoff.decision import Decision
from kvbridge.model.model import Model
from kvbridge.model.probe import cache_argument

DEFAULT_NEW_TOKENS = 64


@dataclass(frozen=True, eq=False)
class Handoff:
    """The receiver's state at the end of a prompt. `ids` `[tokens]` is the whole prompt in the receiver's tokens;
    `layers[i][stream]` `[cached, heads, width]` as cached, None after a refusal (then nothing is cached).
    """

    decision: Decision
    provenance: Provenance
    receiver: Model
    ids: Tensor
    layers: list[LayerKV] | None
    cached: int

    @property
    def cache(self) -> DynamicCache:
        """A fresh transformers cache over the first `cached` tokens, empty after a refusal; growing it leaves this
        handoff as it was."""
        if self.layers is None:
            return DynamicCache(config=self.receiver.model.config)
        return build_cache(self.receiver, self.layers, self.provenance)

    @property
    def remaining_ids(self) -> Tensor:
        """Prompt tokens that are not cached, `[1, n]` (the whole prompt after a refusal; n ≥ 1 unless it is empty): feed
        them with `cache` to get the next token's logits."""
        return self.ids[None, self.cached :].to(self.receiver.device)

    @torch.no_grad()
    def generate(self, max_new_tokens: int | None = None, **generate_kwargs: Any) -> Tensor:
        """`transformers.generate` from here: returns prompt and continuation, `[sequences, tokens]`.

        `max_new_tokens` is 64 unless it, `max_length=` or the length of a `generation_config=` says otherwise. Every
        generate argument passes through (streamer, sampling, stopping, beams, …). After a refusal this is plain dense
        generation. Can be called again: the handoff is not modified. Raises UsageError on an empty prompt.
        """
        _own(generate_kwargs)
        _set_length(generate_kwargs, max_new_tokens)
        if len(self.ids) == 0:
            raise UsageError("the prompt is empty: there is no token to go on from")
        ids = self.ids[None].to(self.receiver.device)
        if self.layers is not None:
            generate_kwargs |= _repeated(self.receiver, self.cache, generate_kwargs)
        return self.receiver.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **generate_kwargs,
        )

    def text(self, max_new_tokens: int | None = None, **generate_kwargs: Any) -> str:
        """The continuation alone, decoded; arguments as of `generate`."""
        out = self.generate(max_new_tokens, **generate_kwargs)
        return self.receiver.tokenizer.decode(out[0, len(self.ids) :], skip_special_tokens=True)

    def snapshot(self) -> KVSnapshot:
        """The handed-over cache as a snapshot (a copy) that keeps its provenance: another handoff refuses a translated
        one."""
        if self.layers is None:
            raise UsageError("a refused handoff has no cache; capture the receiver instead")
        pairs = [(k.clone(), v.clone()) for k, v in self.cache_full()]
        return KVSnapshot.from_cache(pairs, self.receiver, self.ids, provenance=self.provenance)

    def cache_full(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values `[1, heads, cached, width]` per layer, sliding layers at full length."""
        assert self.layers is not None
        return [
            (layer["k"].transpose(0, 1)[None], layer["v"].transpose(0, 1)[None])
            for layer in self.layers
        ]


@torch.no_grad()
def generate_many(
    handoffs: Sequence[Handoff], max_new_tokens: int | None = None, **generate_kwargs: Any
) -> list[Tensor]:
    """Continues several handoffs of one receiver in one batch, padded on the left; refused ones go one by one.
    Lengths as of `Handoff.generate`; `max_length=` would count the padding and is refused.

    Returns prompt and continuation `[tokens]` per handoff, padding removed from the left. One sequence each: raises
    UsageError where generate would return more, or something else than tokens.
    """
    _own(generate_kwargs)
    if any(
        x is not None
        for x in (generate_kwargs.get("max_length"), _asked(generate_kwargs, "max_length"))
    ):
        raise UsageError(
            "generate_many pads prompts to one length: give max_new_tokens instead of max_length"
        )
    for name, plain in (("num_return_sequences", 1), ("return_dict_in_generate", False)):
        if handoffs and (_setting(handoffs[0].receiver, name, generate_kwargs) or plain) != plain:
            raise UsageError(
                f"generate_many returns the tokens of one sequence per handoff; leave {name} out"
            )
    ready = [i for i, h in enumerate(handoffs) if h.layers is not None]
    found: dict[int, Tensor] = {
        i: h.generate(max_new_tokens, **generate_kwargs)[0]
        for i, h in enumerate(handoffs)
        if h.layers is None
    }
    if ready:
        _set_length(generate_kwargs, max_new_tokens)
        receiver = handoffs[ready[0]].receiver
        if any(handoffs[i].receiver is not receiver for i in ready):
            raise UsageError("generate_many continues handoffs of one receiver only")
        longest = max(len(handoffs[i].ids) for i in ready)
        pads = [longest - len(handoffs[i].ids) for i in ready]
        ids = torch.stack(
            [
                torch.nn.functional.pad(handoffs[i].ids, (p, 0))
                for i, p in zip(ready, pads, strict=True)
            ]
        )
        mask = torch.stack([(torch.arange(longest) >= p).long() for p in pads])
        pairs = []
        for layer in range(len(receiver.layers)):
            both = []
            for name in ("k", "v"):
                rows = [
                    torch.nn.functional.pad(handoffs[i].layers[layer][name], (0, 0, 0, 0, p, 0))  # type: ignore[index]
                    for i, p in zip(ready, pads, strict=True)
                ]
                both.append(torch.stack(rows).transpose(1, 2))
            pairs.append((both[0], both[1]))
        cache = DynamicCache(pairs, config=receiver.model.config)
        generate_kwargs |= _repeated(receiver, cache, generate_kwargs)
        out = receiver.model.generate(
            input_ids=ids.to(receiver.device),
            attention_mask=mask.to(receiver.device),
            **generate_kwargs,
        )
        found |= {i: row[p:] for i, row, p in zip(ready, out, pads, strict=True)}
    return [found[i] for i in range(len(handoffs))]


def _repeated(receiver: Model, cache: DynamicCache, arguments: dict[str, Any]) -> dict[str, Any]:
    """The cache arguments of `generate`, with one row per beam or returned sequence (`cache` is modified)."""
    if arguments.pop("use_cache", None) is False or _asked(arguments, "use_cache") is False:
        raise UsageError("a handoff goes on from its cache: leave use_cache=False out")
    copies = max(
        _setting(receiver, name, arguments) or 1 for name in ("num_beams", "num_return_sequences")
    )
    if copies > 1:
        cache.batch_repeat_interleave(copies)
    return {**cache_argument(receiver.model, cache), "use_cache": True}


def _setting(receiver: Model, name: str, arguments: dict[str, Any]) -> Any:
    """What `generate` will use for `name`: its argument, else generation_config=, else the model's own; None if unset."""
    asked = (arguments.get(name), _asked(arguments, name))
    default = getattr(receiver.model.generation_config, name, None)
    return next((value for value in asked if value is not None), default)


def _asked(arguments: dict[str, Any], name: str) -> Any:
    """What a `generation_config=` among the arguments says for `name`."""
    return getattr(arguments.get("generation_config"), name, None)


def _set_length(arguments: dict[str, Any], max_new_tokens: int | None) -> None:
    """Sets `max_new_tokens` where it is given, and to DEFAULT_NEW_TOKENS where nothing says how long (modified)."""
    said = (
        arguments.get("max_length")
        or _asked(arguments, "max_new_tokens")
        or _asked(arguments, "max_length")
    )
    if max_new_tokens is not None or not said:
        arguments["max_new_tokens"] = (
            DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens
        )


def _own(arguments: dict[str, Any]) -> None:
    """Refuses generate arguments that the handoff itself decides."""
    taken = {
        "input_ids",
        "inputs",
        "inputs_embeds",
        "attention_mask",
        "past_key_values",
        "cache",
        "position_ids",
    } & set(arguments)
    if taken:
        raise UsageError(f"the handoff sets {', '.join(sorted(taken))} itself; leave it out")
