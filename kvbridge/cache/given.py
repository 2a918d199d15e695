"""What a caller gives as a cache of one prompt: its form, before any value of it is looked at."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvbridge.errors import UsageError
from kvbridge.geometry import KVGeometry
from kvbridge.model.arguments import found_in


def like_ids(values: Any, tokens: int, name: str) -> Tensor:
    """`[tokens]` out of a tensor `[tokens]` or `[1, tokens]`, as input_ids are, which may reach
    further than the ids, never less far; UsageError for another shape."""
    if not isinstance(values, Tensor) or values.device.type == "meta":
        raise UsageError(f"expected a tensor as {name}, found {found_in(values)}")
    if values.ndim not in (1, 2) or (values.ndim == 2 and len(values) != 1):
        raise UsageError(
            f"expected {name} [{tokens}] or [1, {tokens}] of one request, "
            f"found {tuple(values.shape)}"
        )
    flat = values.to("cpu").reshape(-1)
    if len(flat) < tokens:
        raise UsageError(f"expected {name} of {tokens} tokens, found {len(flat)}")
    return flat


def check_one_run(positions: Tensor) -> None:
    """Raises UsageError where positions do not ascend: they restart where another prompt begins."""
    back = (positions[1:] <= positions[:-1]).nonzero()[:, 0]
    if len(back):
        row = int(back[0]) + 1
        raise UsageError(
            f"position_ids go back from {int(positions[row - 1])} to {int(positions[row])} at row "
            f"{row}: several prompts are packed into one row; give one of them"
        )


def cached_pairs(cache: Any, geometry: KVGeometry) -> list[tuple[Tensor, Tensor]]:
    """Keys and values `[1, heads, tokens, width]` of each layer; UsageError for what is no filled
    cache of one request, of equal length in every layer."""
    for layer in getattr(cache, "layers", None) or ():
        name = type(layer).__name__
        for kind in ("Static", "Quantized"):
            if kind in name:
                raise UsageError(
                    "expected a cache that holds just the tokens it has seen, as they were "
                    f"computed, found a {kind.lower()} one ({name}); use DynamicCache()"
                )
    pairs = _pairs(cache)
    if not pairs or any(not isinstance(t, Tensor) for pair in pairs for t in pair):
        raise UsageError("expected a filled cache, found layers without keys")
    if any(t.ndim != 4 or t.shape[0] != 1 for pair in pairs for t in pair):
        raise UsageError(
            "expected keys and values [1, heads, tokens, width] of one request, found "
            f"{tuple(pairs[0][0].shape)}; take one row of a batch or of beams"
        )
    if len(pairs) != len(geometry.layers):
        raise UsageError(f"expected {len(geometry.layers)} layers, found {len(pairs)}")
    for index, (pair, layer) in enumerate(zip(pairs, geometry.layers, strict=True)):
        shapes = [(int(tensor.shape[1]), int(tensor.shape[3])) for tensor in pair]
        wanted = [(layer.stream(name).heads, layer.stream(name).width) for name in ("k", "v")]
        if shapes != wanted:
            raise UsageError(
                f"layer {index}: expected {wanted} heads and widths of keys and values, found "
                f"{shapes}: this cache is another model's"
            )
    lengths = {int(tensor.shape[2]) for pair in pairs for tensor in pair}
    if len(lengths) != 1:
        raise UsageError(
            f"layers hold {sorted(lengths)} tokens: sliding layers have dropped some, or rows were "
            "evicted; capture with DynamicCache() without a config"
        )
    return pairs


def _pairs(cache: Any) -> list[tuple[Any, Any]]:
    if hasattr(cache, "cross_attention_cache"):
        raise UsageError(
            "expected the cache of a decoder, found an encoder-decoder's; kvbridge takes models "
            "that have a decoder only"
        )
    if hasattr(cache, "layers"):
        return [
            (getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers
        ]
    entries = list(cache) if isinstance(cache, (list, tuple)) else []
    if not entries or any(not isinstance(e, (list, tuple)) or len(e) < 2 for e in entries):
        raise UsageError(
            "expected a filled transformers cache, or pairs of keys and values, "
            f"found {type(cache).__name__}"
        )
    return [(entry[0], entry[1]) for entry in entries]


def has_dropped(cache: Any, geometry: KVGeometry, count: int, tokens: int) -> bool:
    """Whether layers of equal length hold other tokens than the first: they say so, or all slide
    and are just full."""
    layers = getattr(cache, "layers", None)
    if layers is not None and any(int(layer.get_seq_length()) != count for layer in layers):
        return True
    windows = [layer.window_tokens for layer in geometry.layers]
    return layers is None and all(w is not None and count == w - 1 < tokens - 1 for w in windows)
