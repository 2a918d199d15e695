"""From content space to what the receiver caches, beside what it has exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvbridge.cache.snapshot import LayerKV
from kvbridge.handoff.decision import discard
from kvbridge.handoff.pair import Pair
from kvbridge.handoff.request import Request, Rotated, after


@torch.no_grad()
def rotate(pair: Pair, requests: Sequence[Request]) -> list[Request]:
    """Fills in `rotated`: every layer's rows `[cached, heads, width]` in the receiver's dtype, keys
    turned to their positions. Takes `translation` away, which nothing reads afterwards, and refuses
    translations that are not finite. Costs a pass over the rows, no FLOPs to speak of.
    """
    return [_rotated(pair, r) if r.due(r.rotated) else r for r in requests]


def fill_exact(pair: Pair, request: Request, layers: list[LayerKV]) -> None:
    """Writes into `layers` (modified) what is exact: rows that the receiver knows, layers that it
    computed itself, else those it shares with the sender bit for bit.

    Done before a repair, which reads them, and after it: a forward of few tokens rounds otherwise
    than a prefill.
    """
    aligned, features = after("align", request.aligned), after("features", request.features)
    start, device = request.start, pair.receiver.device
    if request.known is not None:
        for target, own in zip(layers, request.known.layers, strict=True):
            for name, tensor in target.items():
                tensor[:start] = own[name][:start].to(tensor)
    computed = [] if features.first is None else features.first.layers
    for target, own in zip(layers, computed, strict=False):
        for name, tensor in target.items():
            tensor[start:] = own[name]
    covered = aligned.alignment.covered.nonzero()[:, 0]
    if len(covered) == 0:
        # A prompt that is known whole: the sender's layers may be others, of another shape.
        return
    read, at = aligned.alignment.index[covered], covered.to(device)
    for layer in range(len(computed), features.exact_layers):
        for name, tensor in layers[layer].items():
            tensor[at] = request.snapshot.layers[layer][name][read].to(tensor)


def _rotated(pair: Pair, request: Request) -> Request:
    translation = after("translate", request.translation)
    rows, rotation = translation.rows, pair.receiver.rotation
    # Asked for once: a model looks its device and dtype up among its weights.
    device, dtype = pair.receiver.device, pair.receiver.dtype
    at = rows.to(device)
    layers = [
        {
            stream.name: torch.zeros(
                (request.cached, stream.heads, stream.width), dtype=dtype, device=device
            )
            for stream in layer.streams
        }
        for layer in pair.receiver.geometry.layers
    ]
    for layer, streams in translation.content.items():
        for name, tensor in streams.items():
            value = rotation.rotate(tensor, rows, layer) if name == "k" else tensor
            if not bool(torch.isfinite(value).all()):
                refusal = discard("not_finite", f"layer {layer} {name} of the translation")
                return replace(request, refusal=refusal)
            layers[layer][name][at] = value.to(dtype)
    fill_exact(pair, request, layers)
    return replace(request, translation=None, rotated=Rotated(rows, layers))
