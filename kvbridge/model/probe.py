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

PROBE_TOKENS = 13
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


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """The decoder's list of layers, under whichever of the usual names it stands."""
    for name in ("layers", "h", "blocks"):
        found = getattr(decoder, name, None)
        if isinstance(found, nn.ModuleList):
            return found
    raise UnsupportedModel(
        f"{type(decoder).__name__}: expected a list of layers named layers, h or blocks, found none"
    )


def cached_layers(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values `[batch, heads, tokens, width]` of the layers that a forward has filled, in
    order."""
    filled = [layer for layer in cache.layers if layer.is_initialized and layer.keys is not None]
    return [(layer.keys, layer.values) for layer in filled]


def cache_argument(model: nn.Module, cache: Any) -> dict[str, Any]:
    """The keyword under which this model's forward takes a cache: `cache` in new releases, else
    `past_key_values`."""
    forward = inspect.unwrap(type(model).forward)
    return {
        "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values": cache
    }


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
    count = min(PROBE_TOKENS, getattr(config, "max_position_embeddings", PROBE_TOKENS))
    step = max(1, min(97, getattr(config, "max_position_embeddings", 10**6) // count))
    positions = torch.arange(count) * step
    ids = (torch.arange(count) * 7919 + 11) % min(config.vocab_size, 50_000)
    cache = DynamicCache()
    with recorded_keys(layers, name) as raw:
        model.get_decoder()(
            input_ids=ids[None].to(model.device),
            position_ids=positions[None].to(model.device),
            use_cache=True,
            **cache_argument(model.get_decoder(), cache),
        )
    pairs = cached_layers(cache)
    if len(pairs) != len(layers):
        raise UnsupportedModel(
            f"{name}: expected K and V cached by each of {len(layers)} layers, found {len(pairs)}; some share or lack them"
        )
    cached, values, content = [], [], []
    for index, (keys, vals) in enumerate(pairs):
        if keys.ndim != 4 or keys.shape[:3] != vals.shape[:3] or keys.shape[2] != count:
            raise UnsupportedModel(
                f"{name}: layer {index} caches tensors of shapes {tuple(keys.shape)} and {tuple(vals.shape)}, "
                "expected [batch, heads, tokens, width] for K and V alike (latent caches are not supported)"
            )
        cached.append(keys[0].transpose(0, 1))
        values.append(vals[0].transpose(0, 1))
        content.append(_as_heads(raw[index], *cached[-1].shape))
    return Probe(
        content,
        cached,
        positions,
        [(k.shape[1], k.shape[2]) for k in cached],
        [(v.shape[1], v.shape[2]) for v in values],
        windows,
    )


@contextmanager
def recorded_keys(layers: nn.ModuleList, name: str) -> Iterator[dict[int, Tensor]]:
    """Records each layer's keys before RoPE during forwards inside the block; hooks are removed at
    its end."""
    raw: dict[int, Tensor] = {}
    handles = []
    try:
        for index, layer in enumerate(layers):
            module, part = _key_source(layer, name, index)

            def keep(
                _m: nn.Module, _i: Any, output: Tensor, index: int = index, part: Any = part
            ) -> None:
                raw[index] = part(output.detach())

            handles.append(module.register_forward_hook(keep))
        yield raw
    finally:
        for handle in handles:
            handle.remove()


def _key_source(layer: nn.Module, name: str, index: int) -> tuple[nn.Module, Any]:
    """The module whose output holds the keys before RoPE, and how to take them from it."""
    attention = next(
        (getattr(layer, a) for a in ("self_attn", "attn", "attention") if hasattr(layer, a)), None
    )
    if attention is None:
        raise UnsupportedModel(
            f"{name}: layer {index} has no attention module (self_attn, attn or attention)"
        )
    if getattr(attention, "kv_lora_rank", None):
        raise UnsupportedModel(
            f"{name}: layer {index} caches a latent shared by its heads (MLA), which is not translated yet"
        )
    for attribute in ("k_norm", "k_proj"):
        module = getattr(attention, attribute, None)
        if isinstance(module, nn.Module) and not isinstance(module, nn.Identity):
            return module, lambda output: output
    if hasattr(attention, "c_attn"):
        return attention.c_attn, lambda output: output.chunk(3, dim=-1)[1]
    if hasattr(attention, "qkv_proj"):
        config = attention.config
        width = attention.head_dim
        sizes = (config.num_attention_heads * width, config.num_key_value_heads * width)
        return attention.qkv_proj, lambda output: output.split(
            (sizes[0], sizes[1], output.shape[-1] - sum(sizes)), dim=-1
        )[1]
    if hasattr(attention, "query_key_value"):
        heads = attention.config.num_attention_heads
        return attention.query_key_value, lambda output: output.unflatten(-1, (heads, 3, -1))[
            ..., 1, :
        ].flatten(-2)
    raise UnsupportedModel(
        f"{name}: layer {index} ({type(attention).__name__}) has no k_norm, k_proj, qkv_proj, query_key_value or c_attn "
        "to check RoPE against"
    )


def _as_heads(output: Tensor, tokens: int, heads: int, width: int) -> Tensor:
    """`[1, tokens, heads·width]`, `[1, tokens, heads, width]` or `[1, heads, tokens, width]` as
    `[tokens, heads, width]`."""
    if output.ndim == 4 and output.shape[1] == heads and output.shape[2] == tokens:
        return output[0].transpose(0, 1)
    return output.reshape(tokens, heads, width)
