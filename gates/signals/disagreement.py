"""Two maps from disjoint sender layers to the last layers' values: how far apart they are.

Costs both maps over a few tokens.
"""

import math

import torch

from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.costs import GatePart, Shape
from kvbridge.gates.signals.extras import rows_of
from kvbridge.gates.signals.reading import Inapplicable, Reading

FEW = 16


def _flops(shape: Shape) -> int:
    return 2 * shape.halves_parameters * min(FEW, shape.tokens)


BOTH_HALVES = GatePart("halves", _flops)


def _read(reading: Reading) -> tuple[float, ...]:
    extras = reading.extras
    if len(extras.halves) != 2:
        raise Inapplicable("no two maps were fitted: the sender has one layer")
    reading.spend(BOTH_HALVES)
    rows = reading.sampled(FEW)
    content = {i: reading.content(rows, i) for layers in extras.half_layers for i in layers}
    ones = torch.ones((len(rows), 1))
    outputs = []
    for layers, weights in zip(extras.half_layers, extras.halves, strict=True):
        inputs = torch.cat((rows_of(content, layers).cpu(), ones), 1)
        outputs.append(inputs @ weights)
    a, b = outputs
    size = 0.5 * (a.norm(dim=1) + b.norm(dim=1))
    apart = (a - b).norm(dim=1) / size.clamp_min(1e-6)
    return math.log(float(apart.mean()) + 1e-6), math.log(float(apart[-1]) + 1e-6)


DISAGREEMENT = Signal(
    ("disagreement", "disagreement_last"),
    _read,
    (BOTH_HALVES,),
    "log relative distance of two maps from disjoint sender layers: mean over a few tokens, "
    "and the last one",
)
