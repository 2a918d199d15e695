"""Several caches of one receiver side by side, padded on the left, and what the receiver makes of
what follows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbridge.cache.padded import padded_cache
from kvbridge.cache.snapshot import LayerKV
from kvbridge.model.model import Model
from kvbridge.model.probe import cache_argument


class Continuing:
    """`caches[i][layer][stream]` `[cached, heads, width]` at full length; they are copied, not
    modified. `step` grows this object's own cache."""

    def __init__(self, receiver: Model, caches: Sequence[list[LayerKV]]) -> None:
        self.receiver = receiver
        self._cache, self._mask = padded_cache(receiver, caches)
        self._position = self._mask.sum(dim=1)

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Logits `[requests, tokens, vocabulary]` fp32 after each of ids `[requests, tokens]`; the
        cache grows."""
        count = ids.shape[1]
        self._mask = torch.cat((self._mask, torch.ones_like(ids)), dim=1)
        places = self._position[:, None] + torch.arange(count)
        self._position = self._position + count
        device = self.receiver.device
        return self.receiver.model(
            input_ids=ids.to(device),
            attention_mask=self._mask.to(device),
            position_ids=places.to(device),
            use_cache=True,
            **cache_argument(self.receiver.model, self._cache),
        ).logits.float()

    def greedy(self, first: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Feeds `first` `[requests, 1]`, then its own choices: ids `[requests, tokens]` and log
        probabilities `[requests, tokens, vocabulary]` that chose them."""
        ids, logs, current = [], [], first
        for _ in range(tokens):
            logs.append(self.step(current)[:, -1].log_softmax(-1))
            current = logs[-1].argmax(-1, keepdim=True).cpu()
            ids.append(current)
        return torch.cat(ids, dim=1), torch.stack(logs, dim=1)


@torch.no_grad()
def followed(receiver: Model, caches: Sequence[list[LayerKV]], ids: Tensor) -> Tensor:
    """Log probabilities `[requests, tokens, vocabulary]` after each of ids `[requests, tokens]`, in
    one forward."""
    return Continuing(receiver, caches).step(ids).log_softmax(-1)
