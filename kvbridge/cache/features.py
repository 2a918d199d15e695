"""What a model itself can say about a text from its first layers, exactly and cheaply: receiver
features, early K/V."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvbridge.cache.layers import LayerKV, build_cache
from kvbridge.cache.run import recorded_at, run_decoder
from kvbridge.errors import UsageError
from kvbridge.model.model import Model


def hidden_layer(spec: str) -> int | None:
    """Layer whose entering residual stream a feature spec names: `none` → None, `embeddings` → 0,
    `hidden:m` → m."""
    if spec == "none":
        return None
    if spec == "embeddings":
        return 0
    kind, _, layer = spec.partition(":")
    if kind == "hidden" and layer.isdecimal() and int(layer) > 0:
        return int(layer)
    raise UsageError(
        f"expected none, embeddings or hidden:m with m ≥ 1 as receiver features, found {spec!r}"
    )


@dataclass(frozen=True)
class FirstLayers:
    """`hidden` `[tokens, hidden]` fp32: what enters the layer asked for; `layers`: exact KV of
    layers 0..m−1 as cached."""

    hidden: Tensor
    layers: list[LayerKV]


class _Reached(Exception):
    """Not an error: a forward has come as far as it should."""


@contextmanager
def stopped_at(layer: nn.Module) -> Iterator[None]:
    """Inside the block, a forward of this thread that reaches `layer` ends there by raising; others
    go on. The hook is removed at its end."""

    thread = threading.get_ident()

    def stop(*_: Any) -> None:
        if threading.get_ident() == thread:
            raise _Reached

    handle = layer.register_forward_pre_hook(stop)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def noted(cache: DynamicCache, until: int | None = None) -> Iterator[list[LayerKV]]:
    """Inside the block, what each layer hands to `cache` is appended to the list: K/V `[n, heads,
    width]` of the tokens that run, all of them where a sliding layer keeps its window only. `cache`
    is filled as ever.

    With `until`, a forward ends without an error where that layer hands over: before its attention
    and its MLP, and before its rows are stored. So does one that `stopped_at` ends. At the end of
    the block `cache` is an ordinary one again.
    """
    rows: list[LayerKV] = []
    store = cache.update

    def update(
        key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        rows.append({"k": key_states[0].transpose(0, 1), "v": value_states[0].transpose(0, 1)})
        if layer_idx == until:
            raise _Reached
        return store(key_states, value_states, layer_idx, *args, **kwargs)

    vars(cache)["update"] = update
    try:
        with suppress(_Reached):
            yield rows
    finally:
        del vars(cache)["update"]


@torch.no_grad()
def first_layers(
    model: Model,
    ids: Tensor,
    count: int,
    *,
    entering: int | None = None,
    past: Sequence[LayerKV] = (),
) -> FirstLayers:
    """Runs the first `count` layers (0 ≤ count < layers) over ids `[tokens]`, and no further: from
    position 0, or after the tokens whose rows `[n, heads, width]` of at least `count` layers are
    `past` (not modified).

    From position 0 on, the KV of layers 0..count−1 is bit-equal to a full forward's; `hidden` is
    what enters layer `entering` (0 to count, by default count).
    """
    wanted = count if entering is None else entering
    if not 0 <= wanted <= count < len(model.layers):
        raise UsageError(
            f"expected 0 to {len(model.layers) - 1} first layers of {model.name} and features up "
            f"to them, found {count} and {wanted}"
        )
    if past and len(past) < count:
        raise UsageError(f"expected rows of {count} layers before, found {len(past)}")
    arguments: dict[str, Any] = {}
    cache = DynamicCache()
    if past:
        start = len(past[0]["k"])
        stop = start + len(ids)
        arguments["position_ids"] = torch.arange(start, stop)[None]
        if count:
            moved = [{n: t.to(model.device) for n, t in x.items()} for x in past[:count]]
            cache = build_cache(model, moved)
            arguments["attention_mask"] = torch.ones((1, stop), dtype=torch.int64)
    with (
        recorded_at(model.layers[wanted]) as entered,
        stopped_at(model.layers[count]),
        noted(cache) as rows,
    ):
        run_decoder(model, ids[None], cache=cache, **arguments)
    return FirstLayers(entered[0][0].float(), rows)


@torch.no_grad()
def early_kv(
    model: Model, ids: Tensor, positions: Tensor, past: Sequence[LayerKV] = ()
) -> list[LayerKV]:
    """K/V `[n, heads, width]` as cached, of layers 0..m, for ids `[n]` at positions `[n]`:
    bit-equal to a forward of the same tokens over the same rows, of which only what these need is
    run: m whole layers, and layer m up to its projections.

    `past`: m layers' rows `[positions[0], heads, width]` of the tokens before; they are not
    modified. Without any (m = 0) positions may leave holes: layer 0's K/V depend on each token and
    its position alone. Raises UsageError for rows of all layers or more, or of another number of
    tokens.
    """
    if len(past) >= len(model.layers):
        raise UsageError(
            f"expected rows of fewer than {len(model.layers)} layers of {model.name}, "
            f"found {len(past)}"
        )
    before = {len(t) for layer in past for t in layer.values()}
    if past and before != {int(positions[0])}:
        raise UsageError(
            f"expected rows of the {int(positions[0])} tokens before, found {sorted(before)}"
        )
    cache = build_cache(
        model, [{name: t.to(model.device) for name, t in layer.items()} for layer in past]
    )
    arguments: dict[str, Any] = {"position_ids": positions[None]}
    if past:
        arguments["attention_mask"] = torch.ones((1, int(positions[-1]) + 1), dtype=torch.int64)
    with noted(cache, until=len(past)) as rows:
        run_decoder(model, ids[None], cache=cache, **arguments)
    return rows
