"""How unusual the sender's rows are: leverage in the fit's low-rank factor, what lies outside it,
distance to the corpus.

The factor is of the rows that the maps were fitted on, the corpus is the calibration's. Costs one
projection of sampled rows.
"""

import math

from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.costs import SAMPLED, GatePart, Shape
from kvbridge.gates.signals.reading import Inapplicable, Reading


def _flops(shape: Shape) -> int:
    return 2 * shape.basis_numbers * min(SAMPLED, shape.tokens)


PROJECTION = GatePart("basis", _flops)


def _read(reading: Reading) -> tuple[float, ...]:
    factors, centre = reading.factors, reading.extras.centre
    if not factors or set(centre) != set(factors):
        raise Inapplicable("the asset has no factor of the rows it was fitted on; fit it again")
    reading.spend(PROJECTION)
    rows = reading.sampled()
    leverage, outside, distance = [], [], []
    for stream, factor in factors.items():
        x = factor.standardised({i: reading.content(rows, i) for i in factor.layers})
        z = factor.whitened(x)
        leverage.append(float(z.square().mean()))
        outside.append(factor.outside(x, z))
        # Times the rows: a mean of n rows of the corpus lies 1/n from its centre, so this is 1 for
        # any n.
        distance.append(float((z.mean(0) - centre[stream]).square().mean()) * len(z))
    count = len(factors)
    return (
        math.log(sum(leverage) / count + 1e-6),
        sum(outside) / count,
        math.log(sum(distance) / count + 1e-6),
    )


LEVERAGE = Signal(
    ("leverage", "outside", "corpus_distance"),
    _read,
    (PROJECTION,),
    "log mean leverage of sampled sender rows, their energy outside the factor, "
    "distance of their mean to the corpus'",
    integrity=True,
)
