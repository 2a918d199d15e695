"""What the receiver itself computes before anything is translated: its own first layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvbridge.cache.features import hidden_layer
from kvbridge.cache.snapshot import LayerKV
from kvbridge.handoff.pair import Pair
from kvbridge.handoff.plan import RepairPlan
from kvbridge.handoff.request import Features, Request, after


def features(pair: Pair, requests: Sequence[Request]) -> list[Request]:
    """Fills in `features`: first layers `[cached − start, heads, width]` and what enters the layer
    that the maps read, `[cached − start, hidden]`. Costs that share of a prefill's layers over the
    tokens `[start, cached)`, one forward a request; nothing where every layer is shared or
    known."""
    return [replace(r, features=_features(pair, r)) if r.due(r.features) else r for r in requests]


def first_layers(pair: Pair, plan: RepairPlan, shared: int) -> int:
    """How many of the receiver's own layers run over the tokens it does not know, where the sender
    shares the first `shared` bit for bit; 0 where none needs to."""
    total = len(pair.receiver.geometry.layers)
    translator = pair.translator
    if shared == total or translator is None:
        return 0
    wanted = hidden_layer(translator.receiver_features)
    depth = max(plan.layers, wanted or 0)
    # Layers that the translator leaves out are the receiver's to compute, unless they are shared.
    own = 1 + max((i for i in range(total) if i not in translator.layers), default=-1)
    if own > shared:
        depth = max(depth, own)
    return 0 if wanted is None and depth <= shared else depth


def _features(pair: Pair, request: Request) -> Features:
    shared = after("align", request.aligned).shared_layers
    translator = pair.translator
    if shared == len(pair.receiver.geometry.layers) or translator is None:
        return Features(None, shared, None)
    wanted = hidden_layer(translator.receiver_features)
    depth = first_layers(pair, request.plan, shared)
    if wanted is None and depth == 0:
        return Features(None, shared, None)
    start = request.start
    past: list[LayerKV] = []
    if request.known is not None and start:
        past = [{n: t[:start] for n, t in layer.items()} for layer in request.known.layers]
    ids = request.encoding.ids[start : request.cached]
    first = pair.receiver.first_layers(ids, depth, entering=wanted, past=past)
    hidden = None if wanted is None else first.hidden
    return Features(first, max(depth, shared), hidden)
