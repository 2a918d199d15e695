"""Repair: tokens that the receiver computes itself on top of a translated cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import get_layer_types_and_kwargs

from kvbridge.cache.prefill import run_decoder
from kvbridge.cache.provenance import FIDELITIES
from kvbridge.cache.snapshot import LayerKV
from kvbridge.errors import UsageError
from kvbridge.model.load import Model
from kvbridge.model.probe import cached_layers

APPROXIMATE, REPAIRED, EXACT = (FIDELITIES.index(f) for f in ("approximate", "repaired", "exact"))


@dataclass(frozen=True)
class RepairPlan:
    """What the receiver recomputes: the first `sinks` tokens, the last `tail` (the very last one stays uncached and
    opens generation, so tail ≥ 1), the first `layers` layers over all tokens, and chosen `tokens` by position.
    """

    sinks: int = 4
    tail: int = 1
    layers: int = 1
    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.tail < 1 or self.layers < 0 or any(t < 0 for t in self.tokens):
            raise UsageError(
                f"expected sinks ≥ 0, tail ≥ 1, layers ≥ 0 and tokens ≥ 0, found {self}"
            )

    def chosen(self, cached: int, extra: Tensor | None = None) -> Tensor:
        """Positions `[n]` (int64, ascending) recomputed among the `cached` tokens; `extra` `[cached]` adds to them."""
        marks = torch.zeros(cached, dtype=torch.bool) if extra is None else extra.clone()
        marks[: self.sinks] = True
        marks[max(0, cached - self.tail + 1) :] = True
        marks[[t for t in self.tokens if t < cached]] = True
        return marks.nonzero()[:, 0]


@torch.no_grad()
def recompute(
    model: Model,
    ids: Tensor,
    layers: list[LayerKV],
    chosen: Tensor,
    *,
    following: Tensor | None = None,
) -> Tensor | None:
    """Replaces rows `chosen` `[n]` of `layers` (as cached, `[tokens, heads, width]`, modified) by the receiver's own.

    ids `[tokens]` stand at positions 0..tokens−1. One forward of the chosen tokens: each sees the rows before it that
    are not chosen, as they stand, and the chosen tokens up to itself. `following` `[m]`: ids of the next tokens, which
    run along and are not cached. Returns what leaves the last layer, `[n + m, hidden]`; None where nothing ran.
    """
    more = 0 if following is None else len(following)
    if len(chosen) + more == 0:
        return None
    device, count = model.device, len(ids)
    kept = torch.ones(count, dtype=torch.bool)
    kept[chosen] = False
    if not more:
        kept[int(chosen[-1]) :] = False
    kept_at = kept.nonzero()[:, 0]
    at = chosen.to(device)
    cache = DynamicCache()
    if len(kept_at):
        rows = kept_at.to(device)
        for index, layer in enumerate(layers):
            cache.update(
                layer["k"][rows].transpose(0, 1)[None],
                layer["v"][rows].transpose(0, 1)[None],
                index,
            )
    places = torch.cat((chosen, torch.arange(count, count + more)))
    tokens = ids[chosen] if following is None else torch.cat((ids[chosen], following))
    mask = _masks(model, places, torch.cat((kept_at, places)))
    output = run_decoder(
        model, tokens[None], cache=cache, position_ids=places[None], attention_mask=mask
    )
    ours = slice(-len(places), -more if more else None)
    if len(chosen):
        for layer, (keys, values) in zip(layers, cached_layers(cache), strict=True):
            layer["k"][at] = keys[0].transpose(0, 1)[ours]
            layer["v"][at] = values[0].transpose(0, 1)[ours]
    return output.last_hidden_state[0]


def _masks(model: Model, queries: Tensor, keys: Tensor) -> Tensor | dict[str, Tensor]:
    """Additive masks `[1, 1, queries, keys]` by position: causal, and within the window where a layer slides.

    Models whose layers differ in kind take one mask per kind, the others one mask.
    """
    config = model.model.config.get_text_config(decoder=True)
    kinds, arguments = get_layer_types_and_kwargs(config)
    found = {}
    for kind, argument in zip(kinds, arguments, strict=True):
        if kind not in found:
            distance = queries[:, None] - keys[None]
            allowed = distance >= 0
            window = argument.get("sliding_window")
            if window is not None and kind == "chunked_attention":
                allowed &= (queries[:, None] // window) == (keys[None] // window)
            elif window is not None:
                allowed &= distance < window
            mask = torch.zeros(allowed.shape, dtype=model.dtype)
            mask[~allowed] = torch.finfo(model.dtype).min
            found[kind] = mask[None, None].to(model.device)
    return found if len(found) > 1 else next(iter(found.values()))


def fidelity_map(layers: int, cached: int, exact_layers: int, chosen: Tensor) -> list[list[int]]:
    """Indices into FIDELITIES `[layers][cached]` after a repair.

    Exact: the first `exact_layers` layers; chosen tokens that form an unbroken prefix (sinks); and chosen tokens in
    layer `exact_layers` itself, whose KV depends on exact layers only. Other chosen tokens are repaired.
    """
    if exact_layers >= layers or len(chosen) == cached:
        return [[EXACT] * cached for _ in range(layers)]
    picked = set(chosen.tolist())
    prefix = next((t for t in range(cached) if t not in picked), cached)
    rows = []
    for layer in range(layers):
        if layer < exact_layers:
            rows.append([EXACT] * cached)
            continue
        own = EXACT if layer == exact_layers else REPAIRED
        rows.append(
            [EXACT if t < prefix else own if t in picked else APPROXIMATE for t in range(cached)]
        )
    return rows
