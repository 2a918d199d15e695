"""Several caches of one model side by side, padded on the left."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from kvbridge.cache.snapshot import LayerKV
from kvbridge.model.model import Model


def padded_cache(model: Model, caches: Sequence[list[LayerKV]]) -> tuple[DynamicCache, Tensor]:
    """A transformers cache of `caches` (each `[cached, heads, width]` per layer and stream at full
    length, copied) as rows of one batch, and its attention mask `[requests, longest]` int64: 0 on
    the padding. Sliding layers are given their full length, so that they cut themselves."""
    lengths = [len(layers[0]["k"]) for layers in caches]
    longest = max(lengths)
    pads = [longest - length for length in lengths]
    pairs = []
    for layer in range(len(model.geometry.layers)):
        streams = []
        for name in ("k", "v"):
            rows = [
                pad(cache[layer][name], (0, 0, 0, 0, before, 0))
                for cache, before in zip(caches, pads, strict=True)
            ]
            streams.append(torch.stack(rows).transpose(1, 2))
        pairs.append((streams[0], streams[1]))
    mask = torch.stack([(torch.arange(longest) >= before).long() for before in pads])
    return DynamicCache(pairs, config=model.model.config), mask
