"""Translated against the receiver's own K and V in the layers that it computed itself, over sampled tokens.

Costs the maps of those layers over the sample; the layers themselves belong to the repair.
"""

import torch

from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.reading import Inapplicable, Reading
from kvbridge.gates.signals.residuals import relative


def _read(reading: Reading) -> tuple[float, ...]:
    e = reading.evidence
    part = reading.translator.only(range(e.exact_layers)).to(e.receiver.device)
    if not part.layers:
        raise Inapplicable("the translator has no map of a layer that the receiver computed itself")
    reading.spend("first_maps")
    rows = reading.sampled()
    features = None if e.features is None else e.features[rows.to(e.features.device)]
    content = {
        i: {n: x.to(e.receiver.device) for n, x in reading.content(rows, i).items()}
        for i in part.sender_layers
    }
    out = part(content, features)
    found: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
    for layer, streams in out.items():
        for name, value in streams.items():
            value = e.receiver.rotation.rotate(value, rows, layer) if name == "k" else value
            found[name].append(relative(value, e.repaired[layer][name][rows.to(value.device)]))
    k, v = (torch.stack(found[name]) for name in ("k", "v"))
    return float(k.mean()), float(v.mean()), float(torch.maximum(k, v).max())


FIRST_LAYERS = Signal(
    ("first_k", "first_v", "first_worst"),
    _read,
    ("first_maps",),
    "relative error of the maps of the receiver's own first layers: mean of keys, of values, worst sampled token",
    integrity=True,
)
