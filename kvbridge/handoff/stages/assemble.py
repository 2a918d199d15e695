"""What the caller gets: decision, cache, and where every value of it came from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvbridge.cache.provenance import Provenance, exact_provenance, spans_of
from kvbridge.handoff.pair import Pair
from kvbridge.handoff.plan import fidelity_map
from kvbridge.handoff.request import Request, after
from kvbridge.handoff.result import Handoff


def assemble(pair: Pair, requests: Sequence[Request]) -> list[Handoff]:
    """Handoffs of judged requests: the repaired rows with their provenance where the decision
    accepts, else nothing cached, which makes the receiver's next forward a dense prefill. No
    FLOPs."""
    return [_assembled(pair, request) for request in requests]


def _assembled(pair: Pair, request: Request) -> Handoff:
    decision = after("judge", request.decision)
    receiver, ids = pair.receiver, request.encoding.ids
    if not decision.accepted:
        dense = exact_provenance(receiver.geometry.digest, len(receiver.geometry.layers), 0)
        return Handoff(decision, dense, receiver.model, ids, None, 0)
    layers = after("repair", request.repaired).layers
    provenance = _provenance(pair, request)
    return Handoff(decision, provenance, receiver.model, ids, layers, request.cached)


def _provenance(pair: Pair, request: Request) -> Provenance:
    total = len(pair.receiver.geometry.layers)
    exact_layers = after("features", request.features).exact_layers
    own = torch.cat((torch.arange(request.start), after("align", request.aligned).chosen))
    matrix = fidelity_map(total, request.cached, exact_layers, own)
    translated = exact_layers < total
    return Provenance(
        pair.sender.geometry.digest,
        pair.receiver.geometry.digest,
        None if pair.asset is None else pair.asset.digest,
        request.snapshot.provenance.depth + 1 if translated else 0,
        spans_of(matrix),
    )
