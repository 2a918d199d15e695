"""The plan's tokens, computed by the receiver on top of the translated cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvbridge.handoff.decision import discard
from kvbridge.handoff.pair import Pair
from kvbridge.handoff.request import Repaired, Request, after
from kvbridge.handoff.stages.rotate import fill_exact


@torch.no_grad()
def repair(pair: Pair, requests: Sequence[Request]) -> list[Request]:
    """Fills in `repaired`: a copy of the rotated rows `[cached, heads, width]` with the chosen
    tokens recomputed, and of observed requests the forward's states and queries. Refuses caches
    that are not finite then. Costs one forward of the chosen tokens (and of the prompt's last one,
    where the request is observed) over the cache, a request.
    """
    return [_repaired(pair, r) if r.due(r.repaired) else r for r in requests]


def _repaired(pair: Pair, request: Request) -> Request:
    rotated = after("rotate", request.rotated)
    layers = [{name: t.clone() for name, t in layer.items()} for layer in rotated.layers]
    ids = request.encoding.ids
    forward = pair.receiver.repair(
        ids[: request.cached],
        layers,
        after("align", request.aligned).chosen,
        following=ids[request.cached :] if request.observed else None,
        record_queries=request.observed,
    )
    fill_exact(pair, request, layers)
    if not all(bool(torch.isfinite(t).all()) for layer in layers for t in layer.values()):
        return replace(request, refusal=discard("not_finite", "the cache after repair"))
    return replace(request, repaired=Repaired(layers, forward))
