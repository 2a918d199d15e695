"""Receiver features: what the receiver itself can say about a text from its first layers, exactly and cheaply."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvbridge.errors import UsageError
from kvbridge.models import Model
from kvbridge.prefill import recorded_at, run_decoder
from kvbridge.probe import cached_layers
from kvbridge.snapshot import LayerKV


def hidden_layer(spec: str) -> int | None:
    """Layer whose entering residual stream a feature spec names: `none` → None, `embeddings` → 0, `hidden:m` → m."""
    if spec == "none":
        return None
    if spec == "embeddings":
        return 0
    kind, _, layer = spec.partition(":")
    if kind == "hidden" and layer.isdecimal() and int(layer) > 0:
        return int(layer)
    raise UsageError(f"expected none, embeddings or hidden:m with m ≥ 1 as receiver features, found {spec!r}")


@dataclass(frozen=True)
class FirstLayers:
    """`hidden` `[tokens, hidden]` fp32: what enters the layer asked for; `layers`: exact KV of layers 0..m−1 as cached."""

    hidden: Tensor
    layers: list[LayerKV]


class _Reached(Exception):
    """Not an error: a forward has come as far as it should."""


@contextmanager
def stopped_at(layer: nn.Module) -> Iterator[None]:
    """Inside the block, a forward of this thread that reaches `layer` ends there by raising; others go on. The hook is
    removed at its end."""

    ours = threading.get_ident()

    def stop(*_: Any) -> None:
        if threading.get_ident() == ours:
            raise _Reached

    handle = layer.register_forward_pre_hook(stop)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def first_layers(model: Model, ids: Tensor, count: int, *, entering: int | None = None) -> FirstLayers:
    """Runs the first `count` layers (0 ≤ count < layers) over ids `[tokens]` from position 0, and no further.

    The KV of layers 0..count−1 is bit-equal to a full forward's; `hidden` is what enters layer `entering` (0 to count,
    by default count).
    """
    wanted = count if entering is None else entering
    if not 0 <= wanted <= count < len(model.layers):
        raise UsageError(
            f"expected 0 to {len(model.layers) - 1} first layers of {model.name} and features up to them, found "
            f"{count} and {wanted}"
        )
    cache = DynamicCache()
    with recorded_at(model.layers[wanted]) as entered, stopped_at(model.layers[count]), suppress(_Reached):
        run_decoder(model, ids[None], cache=cache)
    layers = [{"k": k[0].transpose(0, 1), "v": v[0].transpose(0, 1)} for k, v in cached_layers(cache)]
    return FirstLayers(entered[0][0].float(), layers)


@torch.no_grad()
def first_layer_kv(model: Model, ids: Tensor, positions: Tensor) -> LayerKV:
    """What layer 0 caches for ids `[n]` at positions `[n]` (ascending, holes allowed), `[n, heads, width]` as cached: it
    depends on each token and its position alone, so any sample of a prompt gives its very rows.
    """
    cache = DynamicCache()
    arguments: dict[str, Any] = {"cache": cache, "position_ids": positions[None]}
    if len(model.layers) == 1:
        run_decoder(model, ids[None], **arguments)
    else:
        with stopped_at(model.layers[1]), suppress(_Reached):
            run_decoder(model, ids[None], **arguments)
    keys, values = cached_layers(cache)[0]
    return {"k": keys[0].transpose(0, 1), "v": values[0].transpose(0, 1)}
