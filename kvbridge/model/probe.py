"""A few tokens through the live model: what its layers cache, in which shapes, and the keys before
RoPE."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import get_layer_types_and_kwargs

from kvbridge.errors import UnsupportedModel
from kvbridge.model.attention import (
    Projection,
    attention_of,
    decoder_layers,
    normed_keys,
    recorded,
)

PROBE_TOKENS = 13
POSITION_STEP = 97
"""Positions of the probe lie this far apart: at small ones slow RoPE phases hardly turn."""
TRANSLATABLE = ("full_attention", "sliding_attention", "chunked_attention")
REFUSED = {
    "dummy": "shares another layer's KV",
    "mamba": "carries recurrent state",
    "linear_attention": "carries recurrent state",
    "hybrid": "carries recurrent state beside its KV",
    "hybrid_sliding": "carries recurrent state beside its KV",
    "conv": "carries convolution state",
}


@dataclass(frozen=True)
class Probe:
    """Per layer: keys before RoPE and as cached `[tokens, heads, head_dim]`, (heads, width) of K
    and V, window."""

    content: list[Tensor]
    cached: list[Tensor]
    positions: Tensor
    key_shapes: list[tuple[int, int]]
    value_shapes: list[tuple[int, int]]
    windows: list[int | None]


def cached_layers(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values `[batch, heads, tokens, width]` of the layers that a forward has filled, in
    order."""
    filled = [layer for layer in cache.layers if layer.is_initialized and layer.keys is not None]
    return [(layer.keys, layer.values) for layer in filled]


def cache_argument(model: nn.Module, cache: Any) -> dict[str, Any]:
    """The keyword under which this model's forward takes a cache: `cache` in new releases, else
    `past_key_values`."""
    parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return {"cache" if "cache" in parameters else "past_key_values": cache}


def positions_of(config: Any) -> int:
    """How many positions a text config says there are; as good as endless where it says nothing."""
    for name in ("max_position_embeddings", "max_target_positions"):
        positions = getattr(config, name, None)
        if isinstance(positions, int):
            return positions
    return 2**31 - 1


def layer_windows(config: Any, name: str) -> list[int | None]:
    """Sliding window of each layer in tokens (None: full); UnsupportedModel names the first layer
    that cannot be translated."""
    kinds, arguments = get_layer_types_and_kwargs(config)
    for layer, kind in enumerate(kinds):
        if kind not in TRANSLATABLE:
            why = REFUSED.get(kind, f"is of kind {kind!r}, which is not supported")
            raise UnsupportedModel(
                f"{name}: layer {layer} {why}; its cache cannot be translated token by token"
            )
    return [one.get("sliding_window") for one in arguments]


@torch.no_grad()
def probe(model: Any, config: Any, name: str) -> Probe:
    """One forward of a few tokens. Raises UnsupportedModel for caches that are not per-token K and
    V."""
    windows = layer_windows(config, name)
    layers = decoder_layers(model.get_decoder())
    longest = min(positions_of(config), 10**6)
    count = min(PROBE_TOKENS, longest)
    positions = torch.arange(count) * max(1, min(POSITION_STEP, longest // count))
    # Distinct ids spread over the vocabulary; which they are does not matter.
    ids = (torch.arange(count) * 7919 + 11) % min(config.vocab_size, 50_000)
    decoder, cache = model.get_decoder(), DynamicCache()
    with recorded_keys(layers, name) as raw:
        decoder(
            input_ids=ids[None].to(model.device),
            position_ids=positions[None].to(model.device),
            use_cache=True,
            **cache_argument(decoder, cache),
        )
    pairs = cached_layers(cache)
    if len(pairs) != len(layers):
        raise UnsupportedModel(
            f"{name}: expected K and V cached by each of {len(layers)} layers, "
            f"found {len(pairs)}; some share or lack them"
        )
    cached, content, key_shapes, value_shapes = [], [], [], []
    for index, (keys, values) in enumerate(pairs):
        if keys.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.shape[2] != count:
            raise UnsupportedModel(
                f"{name}: layer {index} caches tensors of shapes {tuple(keys.shape)} and "
                f"{tuple(values.shape)}, expected [batch, heads, tokens, width] for K and V alike "
                "(latent caches are not supported)"
            )
        heads, width = keys.shape[1], keys.shape[3]
        cached.append(keys[0].transpose(0, 1))
        if index not in raw or raw[index].numel() != cached[-1].numel():
            raise UnsupportedModel(
                f"{name}: layer {index} projects keys in an order that is not known, so that RoPE "
                "cannot be checked against them"
            )
        content.append(_as_heads(raw[index], count, heads, width))
        key_shapes.append((heads, width))
        value_shapes.append((values.shape[1], values.shape[3]))
    return Probe(content, cached, positions, key_shapes, value_shapes, windows)


@contextmanager
def recorded_keys(layers: nn.ModuleList, name: str) -> Iterator[dict[int, Tensor]]:
    """Inside the block, each layer's keys before RoPE during forwards; hooks are removed at its
    end.

    By layer, as the model's own module returns them. Raises UnsupportedModel, naming the model
    `name`, where a layer has no keys that are its own.
    """
    sources = {index: _key_source(layer, name, index) for index, layer in enumerate(layers)}
    raw: dict[int, Tensor] = {}
    with recorded(sources, raw.__setitem__):
        yield raw


def _key_source(layer: nn.Module, name: str, index: int) -> Projection:
    """Where a layer has its keys before RoPE; raises UnsupportedModel where they are not found."""
    attention = attention_of(layer)
    if attention is None:
        raise UnsupportedModel(
            f"{name}: layer {index} has no attention module (self_attn, attn or attention)"
        )
    if getattr(attention, "kv_lora_rank", None):
        raise UnsupportedModel(
            f"{name}: layer {index} caches a latent shared by its heads (MLA), "
            "which is not translated yet"
        )
    source = normed_keys(attention)
    if source is None:
        raise UnsupportedModel(
            f"{name}: layer {index} ({type(attention).__name__}) has no k_norm, k_proj, qkv_proj, "
            "query_key_value or c_attn, in an order that is known, to check RoPE against"
        )
    return source


def _as_heads(output: Tensor, tokens: int, heads: int, width: int) -> Tensor:
    """Keys as some module returns them: `[1, tokens, heads·width]`, `[1, tokens, heads, width]` or
    `[1, heads, tokens, width]` as `[tokens, heads, width]`."""
    if output.ndim == 4 and output.shape[1] == heads and output.shape[2] == tokens:
        return output[0].transpose(0, 1)
    return output.reshape(tokens, heads, width)
