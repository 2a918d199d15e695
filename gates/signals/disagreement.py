"""Two maps from disjoint sender layers to the last layers' values: how far apart they are.

Costs both maps over a few tokens.
"""

import math

import torch

from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.extras import rows_of
from kvbridge.gates.signals.reading import Inapplicable, Reading


def _read(reading: Reading) -> tuple[float, ...]:
    extras = reading.extras
    if len(extras.halves) != 2:
        raise Inapplicable("no two maps were fitted: the sender has one layer")
    reading.spend("halves")
    rows = reading.few()
    content = {i: reading.content(rows, i) for layers in extras.half_layers for i in layers}
    ones = torch.ones((len(rows), 1))
    a, b = (
        torch.cat((rows_of(content, layers).cpu(), ones), 1) @ w
        for layers, w in zip(extras.half_layers, extras.halves, strict=True)
    )
    apart = (a - b).norm(dim=1) / (0.5 * (a.norm(dim=1) + b.norm(dim=1))).clamp_min(1e-6)
    return math.log(float(apart.mean()) + 1e-6), math.log(float(apart[-1]) + 1e-6)


DISAGREEMENT = Signal(
    ("disagreement", "disagreement_last"),
    _read,
    ("halves",),
    "log relative distance of two maps from disjoint sender layers: mean over a few tokens, and the last one",
)
