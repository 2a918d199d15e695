"""What exact means in these tests: the next token's logits and greedy continuations against the
receiver's own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbridge import Handoff, Model, RepairPlan, Translator
from kvbridge.asset.maps.base import Block
from kvbridge.asset.maps.dense import DenseMaps, Group
from kvbridge.engines.port import Engine

NEW_TOKENS = 16
TOLERANCE = 1e-4
NEAR_TIE = 1e-4
COMPARED: list[tuple[float, float]] = []
PLANS = {
    "default": RepairPlan(),
    "no_sinks": RepairPlan(sinks=0),
    "tail32": RepairPlan(tail=32),
    "layers0": RepairPlan(layers=0),
    "layers2": RepairPlan(layers=2),
    "nothing": RepairPlan(sinks=0, tail=1, layers=0),
    "tokens": RepairPlan(tokens=(9, 10, 30, 31, 32, 70)),
    "everything": RepairPlan(sinks=6, tail=12, layers=2, tokens=(20, 40, 41)),
}


@dataclass(frozen=True)
class Continuation:
    """Logits after the prompt `[vocabulary]`, greedy tokens, and the least margin over all
    steps."""

    logits: Tensor
    tokens: list[int]
    margin: float


@torch.no_grad()
def continued(model: Model, ids: Tensor, handoff: Handoff | None = None) -> Continuation:
    """Greedy continuation by a plain loop (no `generate`), from a handoff's cache or from
    nothing."""
    cache = handoff.cache if handoff is not None else None
    start = handoff.cached if handoff is not None else 0
    feed = handoff.remaining_ids if handoff is not None else ids[None]
    first, tokens, margin, at = None, [], float("inf"), start
    for _ in range(NEW_TOKENS):
        positions = torch.arange(at, at + feed.shape[1])[None]
        out = model.model(
            input_ids=feed, past_key_values=cache, position_ids=positions, use_cache=True
        )
        cache, at, logits = out.past_key_values, at + feed.shape[1], out.logits[0, -1]
        first = logits if first is None else first
        best = logits.topk(2).values
        margin = min(margin, float(best[0] - best[1]))
        feed = logits.argmax()[None, None]
        tokens.append(int(feed))
    assert first is not None
    return Continuation(first, tokens, margin)


def assert_exact(handoff: Handoff, native: Continuation) -> None:
    """Checks logits and tokens; a differing continuation is forgiven only at a near-tie, which is
    counted."""
    assert handoff.decision.accepted, str(handoff.decision)
    continuation = continued(handoff.receiver, handoff.ids, handoff)
    difference = float((continuation.logits - native.logits).abs().max())
    COMPARED.append((difference, native.margin))
    assert difference <= TOLERANCE, f"logits are off by {difference:.2e}"
    if native.margin >= NEAR_TIE:
        assert continuation.tokens == native.tokens


def renamed(model: Model) -> Model:
    """The same model under a contract of its own: no layer counts as shared with the original."""
    layers = tuple(
        replace(layer, weights_digest=f"other-{i}") for i, layer in enumerate(model.geometry.layers)
    )
    geometry = replace(
        model.geometry,
        layers=layers,
        embedding_digest="other",
        weights_digest="other",
        model_id="renamed",
    )
    return replace(model, geometry=geometry, name="renamed")


def identity(
    sender: Model | Engine, receiver: Model | Engine, features: str = "none"
) -> Translator:
    """y = x for every layer and stream; with `features`, their columns count for nothing."""
    groups, tensors = {}, {}
    extra = receiver.geometry.hidden_size if features != "none" else 0
    for index, layer in enumerate(receiver.geometry.layers):
        for stream in layer.streams:
            width, name = stream.features, f"target.{index}.{stream.name}"
            tensors[f"{name}.W"] = torch.cat((torch.zeros(extra, width), torch.eye(width)))
            tensors[f"{name}.b"] = torch.zeros(width)
            group = Group(tuple(range(stream.heads)), (Block(index, stream.name),))
            groups[index, stream.name] = (group,)
    maps = DenseMaps(sender.geometry, receiver.geometry, extra > 0, groups)
    return Translator("full-head", features, maps, tensors)


def biases(translator: Translator) -> list[Tensor]:
    """The bias of every map: changing one makes a translator that is wrong everywhere."""
    return [tensor for name, tensor in translator.tensors.items() if name.endswith(".b")]


def zeroed(handoff: Handoff) -> Handoff:
    """The same handoff over a cache of zeros."""
    assert handoff.layers is not None
    return replace(
        handoff,
        layers=[{n: torch.zeros_like(t) for n, t in layer.items()} for layer in handoff.layers],
    )
