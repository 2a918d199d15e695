"""A model that has its prompt behind it, however it got there, and what it makes of what
follows."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvbridge.cache.prefill import run_decoder
from kvbridge.clock import Stopwatch
from kvbridge.model.model import Model
from kvbridge.model.probe import cache_argument


@dataclass(eq=False)
class Start:
    """State after a prompt: `logits` `[vocabulary]` fp32 for the next token, a cache that covers
    the prompt, the next position, and what it cost: milliseconds to these logits and FLOPs as a
    share of the receiver's prefill.

    `tail` is how many of the last tokens were recomputed, None where nothing was handed over.
    `verdict`, `score` and `reason` are the decision's. `scored` keeps what a task made of it, for
    conditions that share a start.
    """

    model: Model
    logits: Tensor
    cache: Any
    position: int
    ttft_ms: float
    prefill_share: float
    verdict: str | None = None
    score: float | None = None
    reason: str = ""
    scored: Any = None
    tail: int | None = None

    @torch.no_grad()
    def follow(self, ids: Tensor) -> Tensor:
        """Logits `[tokens, vocabulary]` fp32 that predict each of ids `[tokens]`; this state is not
        modified."""
        if len(ids) == 1:
            return self.logits[None]
        cache = copy.deepcopy(self.cache)
        more = forward(self.model, ids[None, :-1], cache, self.position)
        return torch.cat((self.logits[None], more[0].float()))

    @torch.no_grad()
    def greedy(self, tokens: int) -> list[int]:
        """Up to `tokens` greedy ids, an end-of-sequence token left out; this state is not
        modified."""
        cache, logits = copy.deepcopy(self.cache), self.logits
        chosen: list[int] = []
        ends = self.model.model.generation_config.eos_token_id
        stop = set(ends if isinstance(ends, list) else [ends])
        while len(chosen) < tokens:
            token = int(logits.argmax())
            if token in stop:
                break
            chosen.append(token)
            if len(chosen) < tokens:
                step, position = torch.tensor([[token]]), self.position + len(chosen) - 1
                logits = forward(self.model, step, cache, position)[0, -1].float()
        return chosen


@torch.no_grad()
def forward(model: Model, ids: Tensor, cache: Any, position: int, keep: int = 0) -> Tensor:
    """Logits `[1, tokens or keep, vocabulary]` of ids `[1, tokens]` at positions from `position`
    on; `cache` grows."""
    # An all-ones mask keeps jumping positions from being read as packed sequences.
    total = cached_tokens(cache) + ids.shape[1]
    output = model.model(
        input_ids=ids.to(model.device),
        position_ids=torch.arange(position, position + ids.shape[1], device=model.device)[None],
        attention_mask=torch.ones((1, total), dtype=torch.int64, device=model.device),
        use_cache=True,
        logits_to_keep=keep,
        **cache_argument(model.model, cache),
    )
    return output.logits


def cached_tokens(cache: Any) -> int:
    """Tokens a cache has seen, sliding layers included."""
    return int(cache.get_seq_length())


@torch.no_grad()
def prefilled(
    model: Model, ids: Tensor, *, share: float, sinks: int = 0, tail_from: int = 0
) -> Start:
    """A dense prefill of ids `[tokens]`: of the sinks and of everything from `tail_from` on, each
    at its own position."""
    cache = DynamicCache(config=model.model.config)
    watch = Stopwatch(model.device)
    if sinks:
        run_decoder(model, ids[None, :sinks], cache=cache)
    logits = forward(model, ids[None, tail_from:], cache, tail_from, keep=1)[0, -1].float()
    return Start(model, logits, cache, len(ids), watch.ms(), share)
