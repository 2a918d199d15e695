"""How unusual the sender's rows are: leverage in the low-rank factor, what lies outside it, distance to the corpus.

Costs one projection of sampled rows onto the factor.
"""

import math

from kvbridge.gates.extras import basis_rows
from kvbridge.gates.reading import Inapplicable, Reading
from kvbridge.gates.signals.base import Signal


def _read(reading: Reading) -> tuple[float, ...]:
    extras = reading.extras
    if not len(extras.mean):
        raise Inapplicable("no statistics of sender rows were fitted")
    reading.spend("basis")
    rows = reading.sampled()
    content = {i: reading.content(rows, i) for i in extras.basis_layers}
    x = (basis_rows(content, extras.basis_layers).cpu() - extras.mean) / extras.scale
    z = x @ extras.factor
    energy = float(x.square().sum())
    directions = extras.factor / extras.factor.norm(dim=0)
    outside = max(0.0, 1.0 - float((x @ directions).square().sum()) / max(energy, 1e-12))
    leverage = float(z.square().mean())
    distance = float(z.mean(0).square().mean()) * len(z)
    return math.log(leverage + 1e-6), outside, math.log(distance + 1e-6)


LEVERAGE = Signal(
    ("leverage", "outside", "corpus_distance"), _read, ("basis",),
    "log mean leverage of sampled sender rows, their energy outside the factor, distance of their mean to the corpus'",
    integrity=True,
)  # fmt: skip
