"""Translated against recomputed K and V of the known tail, per band of layers.

Costs nothing: the repair computed the tail anyway.
"""

from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.reading import Reading
from kvbridge.gates.signals.residuals import relative


def _read(reading: Reading) -> tuple[float, ...]:
    e, tail = reading.evidence, reading.tail
    layers = range(e.exact_layers, len(e.repaired))
    middle = (e.exact_layers + len(e.repaired)) // 2
    found = []
    for name in ("k", "v"):
        errors = {
            i: float(relative(e.translated[i][name][tail], e.repaired[i][name][tail]).mean())
            for i in layers
        }
        for band in ([i for i in layers if i < middle], [i for i in layers if i >= middle]):
            found.append(sum(errors[i] for i in band or layers) / len(band or layers))
    return tuple(found)


TAIL_RESIDUAL = Signal(
    ("tail_k_low", "tail_k_high", "tail_v_low", "tail_v_high"),
    _read,
    (),
    "relative error of the translated tail: keys and values, lower and upper layers",
    integrity=True,
)
