"""The sender's rows through the maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbridge.asset.folder import Asset
from kvbridge.asset.maps.translator import Translator
from kvbridge.cache.snapshot import LayerKV
from kvbridge.handoff.decision import discard
from kvbridge.handoff.pair import Pair
from kvbridge.handoff.ports import Resident
from kvbridge.handoff.request import Request, Translation, after


@torch.no_grad()
def translate(pair: Pair, requests: Sequence[Request], resident: Resident) -> list[Request]:
    """Fills in `translation`: the rows that each plan asks for in content space, fp32. The rows of
    all requests go through the maps at once, under one lease of `resident`; without room they are
    refused. Requests whose layers are all exact need none. Costs 2 FLOPs a parameter and row.
    """
    total = len(pair.receiver.geometry.layers)
    nothing = Translation(torch.zeros(0, dtype=torch.int64), {})
    places, wanting = [], []
    done = list(requests)
    for place, request in enumerate(requests):
        if not request.due(request.translation) or request.rotated is not None:
            continue
        if after("features", request.features).exact_layers == total:
            done[place] = replace(request, translation=nothing)
        else:
            places.append(place)
            wanting.append(request)
    if not wanting:
        return done
    assert pair.handle is not None  # `align` refuses what needs a translator where there is none
    lease = resident.lease(pair.handle)
    if lease is None:
        needed = pair.handle.manifest.weights_bytes if isinstance(pair.handle, Asset) else 0
        refusal = discard("no_room", f"no room for {needed} bytes")
        for place, request in zip(places, wanting, strict=True):
            done[place] = replace(request, refusal=refusal)
        return done
    with lease as translator:
        translations = _through_maps(pair, wanting, translator)
    for place, request, translation in zip(places, wanting, translations, strict=True):
        done[place] = replace(request, translation=translation)
    return done


def _through_maps(
    pair: Pair, requests: Sequence[Request], translator: Translator
) -> list[Translation]:
    """One translation a request; `translator` is on the receiver's device."""
    rows = [request.rows for request in requests]
    made = [after("features", request.features) for request in requests]
    content = {
        layer: _sender_rows(pair, requests, rows, layer) for layer in translator.sender_layers
    }
    hidden = _hidden_rows(pair, requests, rows)
    skip = min(features.exact_layers for features in made)
    out = translator(content, hidden, skip_layers=skip)
    pieces: list[dict[int, LayerKV]] = [{} for _ in requests]
    counts = [len(at) for at in rows]
    for layer, streams in out.items():
        for name, tensor in streams.items():
            for piece, part in zip(pieces, tensor.split(counts), strict=True):
                piece.setdefault(layer, {})[name] = part
    return [Translation(at, piece) for at, piece in zip(rows, pieces, strict=True)]


def _sender_rows(
    pair: Pair, requests: Sequence[Request], rows: Sequence[Tensor], layer: int
) -> LayerKV:
    """One sender layer's rows in content space, `[all rows, heads, width]` per stream."""
    parts = []
    for request, at in zip(requests, rows, strict=True):
        read = after("align", request.aligned).alignment.index[at]
        parts.append(request.snapshot.content(pair.sender.rotation, read, layer))
    device = pair.receiver.device
    return {name: torch.cat([part[name].to(device) for part in parts]) for name in parts[0]}


def _hidden_rows(pair: Pair, requests: Sequence[Request], rows: Sequence[Tensor]) -> Tensor | None:
    """What the maps read of the receiver at those rows, `[all rows, hidden]`; None where
    nothing."""
    parts = []
    for request, at in zip(requests, rows, strict=True):
        hidden = after("features", request.features).hidden
        if hidden is None:
            return None
        parts.append(hidden[(at - request.start).to(pair.receiver.device)])
    return torch.cat(parts)
