"""Translated against the receiver's own K and V in the layers that it computed itself, over sampled
tokens.

Costs the maps of those layers over the sample; the layers themselves belong to the repair.
"""

import torch

from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.costs import SAMPLED, GatePart, Shape
from kvbridge.gates.signals.reading import Inapplicable, Reading
from kvbridge.gates.signals.residuals import relative


def _flops(shape: Shape) -> int:
    return shape.first_maps_flops * min(SAMPLED, shape.tokens)


FIRST_MAPS = GatePart("first_maps", _flops)


def _read(reading: Reading) -> tuple[float, ...]:
    evidence, receiver = reading.evidence, reading.evidence.receiver
    first = reading.translator.only(range(evidence.exact_layers)).to(receiver.device)
    if not first.layers:
        raise Inapplicable("the translator has no map of a layer that the receiver computed itself")
    reading.spend(FIRST_MAPS)
    rows = reading.sampled()
    features = evidence.features
    if features is not None:
        features = features[rows.to(features.device)]
    content = {}
    for layer in first.sender_layers:
        streams = reading.content(rows, layer)
        content[layer] = {name: x.to(receiver.device) for name, x in streams.items()}
    errors: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
    for layer, translated in first(content, features).items():
        for name, value in translated.items():
            if name == "k":
                value = receiver.rotation.rotate(value, rows, layer)
            own = evidence.repaired[layer][name][rows.to(value.device)]
            errors[name].append(relative(value, own))
    k, v = (torch.stack(errors[name]) for name in ("k", "v"))
    return float(k.mean()), float(v.mean()), float(torch.maximum(k, v).max())


FIRST_LAYERS = Signal(
    ("first_k", "first_v", "first_worst"),
    _read,
    (FIRST_MAPS,),
    "relative error of the maps of the receiver's own first layers: mean of keys, of values, "
    "worst sampled token",
    integrity=True,
)
