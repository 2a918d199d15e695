"""Rows of a model's layers, and the transformers cache over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import DynamicCache

from kvbridge.cache.provenance import Provenance, exact_provenance
from kvbridge.model.model import Model

LayerKV = dict[str, Tensor]
"""Stream → `[tokens, heads, width]` of one layer."""

_MEMORY = "kvbridge_provenance"


def build_cache(
    model: Model, layers: Sequence[LayerKV], provenance: Provenance | None = None
) -> DynamicCache:
    """A transformers cache over full-length `[tokens, heads, width]` tensors; nothing is copied.

    Sliding layers are given their full length, so that they cut themselves and count every token.
    """
    pairs = [
        (layer["k"].transpose(0, 1)[None], layer["v"].transpose(0, 1)[None]) for layer in layers
    ]
    cache = DynamicCache(pairs, config=model.model.config)
    if provenance is not None:
        setattr(cache, _MEMORY, provenance)
    return cache


def remembered(cache: Any, model: Model, layers: int, tokens: int) -> Provenance:
    """What a cache says it is (`build_cache` tells it), grown to `tokens`; any other cache is the
    model's own."""
    known = getattr(cache, _MEMORY, None)
    own = exact_provenance(model.geometry.digest, layers, tokens)
    return own if known is None else known.over(layers, tokens)
