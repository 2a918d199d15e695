"""Some of a prompt's tokens computed anew over the cached rows of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import get_layer_types_and_kwargs

from kvbridge.cache.layers import LayerKV
from kvbridge.cache.run import run_decoder
from kvbridge.errors import UsageError
from kvbridge.model.attention import mask_refusal
from kvbridge.model.model import Model
from kvbridge.model.probe import cached_layers


@torch.no_grad()
def recompute(
    model: Model,
    ids: Tensor,
    layers: list[LayerKV],
    chosen: Tensor,
    *,
    following: Tensor | None = None,
) -> Tensor | None:
    """Replaces rows `chosen` `[n]` of `layers` (as cached, `[tokens, heads, width]`, modified) by
    the model's own; arguments as of `Engine.repair`. Returns what leaves the last layer, `[n + m,
    hidden]`; None where nothing ran.
    """
    more = 0 if following is None else len(following)
    if len(chosen) + more == 0:
        return None
    rows, states = computed_rows(model, ids, layers, chosen, following=following)
    if len(chosen):
        at = chosen.to(model.device)
        for layer, own in zip(layers, rows, strict=True):
            for name, tensor in own.items():
                layer[name][at] = tensor
    return states


@torch.no_grad()
def computed_rows(
    model: Model,
    ids: Tensor,
    layers: Sequence[LayerKV],
    chosen: Tensor,
    *,
    following: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[list[LayerKV], Tensor]:
    """Every layer's rows `[n, heads, width]` of tokens `chosen` `[n]` (at least one token runs), as
    the model computes them over the other rows of `layers` before each, which are not modified; and
    what leaves the last layer, of the `following` `[m]` tokens, too.

    `positions` `[tokens]` are those of the rows, by default counted from 0. Costs one forward of
    n + m tokens and a copy of the rows that are kept.
    """
    if refusal := mask_refusal(model.model):
        raise UsageError(f"{model.name}: {refusal}")
    device, count = model.device, len(ids)
    more = 0 if following is None else len(following)
    kept = torch.ones(count, dtype=torch.bool)
    kept[chosen] = False
    if not more:
        # Nothing after the last chosen token is seen by any that runs.
        kept[int(chosen[-1]) :] = False
    kept_at = kept.nonzero()[:, 0]
    cache = DynamicCache()
    if len(kept_at):
        rows = kept_at.to(device)
        for index, layer in enumerate(layers):
            keys, values = (layer[name].to(device)[rows] for name in ("k", "v"))
            cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], index)
    places = torch.cat((chosen, torch.arange(count, count + more)))
    tokens = ids[chosen] if following is None else torch.cat((ids[chosen], following))
    # The cache holds the kept rows first and the computed ones behind them, whatever their
    # places: the mask says by place who sees whom.
    mask = _masks(model, places, torch.cat((kept_at, places)))
    stands_at = places if positions is None else positions[places]
    output = run_decoder(
        model, tokens[None], cache=cache, position_ids=stands_at[None], attention_mask=mask
    )
    computed = slice(-len(places), -more if more else None)
    own = [
        {"k": keys[0].transpose(0, 1)[computed], "v": values[0].transpose(0, 1)[computed]}
        for keys, values in cached_layers(cache)
    ]
    return own, output.last_hidden_state[0]


def _masks(model: Model, queries: Tensor, keys: Tensor) -> Tensor | dict[str, Tensor]:
    """Additive masks `[1, 1, queries, keys]` by position: causal, and within the window where a
    layer slides. Models whose layers differ in kind take one mask per kind, the others one mask.
    """
    config = model.model.config.get_text_config(decoder=True)
    kinds, arguments = get_layer_types_and_kwargs(config)
    masks: dict[str, Tensor] = {}
    for kind, argument in zip(kinds, arguments, strict=True):
        if kind in masks:
            continue
        distance = queries[:, None] - keys[None]
        allowed = distance >= 0
        window = argument.get("sliding_window")
        if window is not None and kind == "chunked_attention":
            allowed &= (queries[:, None] // window) == (keys[None] // window)
        elif window is not None:
            allowed &= distance < window
        mask = torch.zeros(allowed.shape, dtype=model.dtype)
        mask[~allowed] = torch.finfo(model.dtype).min
        masks[kind] = mask[None, None].to(model.device)
    return masks if len(masks) > 1 else next(iter(masks.values()))
