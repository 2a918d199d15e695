"""Translated against recomputed K and V of the known tail, per band of layers.

Costs nothing: the repair computed the tail anyway.
"""

from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.reading import Reading
from kvbridge.gates.signals.residuals import relative


def _read(reading: Reading) -> tuple[float, ...]:
    evidence, tail = reading.evidence, reading.tail
    translated, repaired = evidence.translated, evidence.repaired
    layers = range(evidence.exact_layers, len(repaired))
    middle = (evidence.exact_layers + len(repaired)) // 2
    lower = [i for i in layers if i < middle] or layers
    upper = [i for i in layers if i >= middle] or layers
    columns = []
    for name in ("k", "v"):
        errors = {
            i: float(relative(translated[i][name][tail], repaired[i][name][tail]).mean())
            for i in layers
        }
        columns += [sum(errors[i] for i in band) / len(band) for band in (lower, upper)]
    return tuple(columns)


TAIL_RESIDUAL = Signal(
    ("tail_k_low", "tail_k_high", "tail_v_low", "tail_v_high"),
    _read,
    (),
    "relative error of the translated tail: keys and values, lower and upper layers",
    integrity=True,
)
