"""Does the sender's cache follow from itself? Its last tokens, run again over the rows before them, against the snapshot.

Costs a forward of nine sender tokens, shared with the sender's loss and its next token.
"""

import math

import torch

from kvbridge.gates.reading import Reading
from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.residuals import relative


def _read(reading: Reading) -> tuple[float, ...]:
    again = reading.sender_tail
    layers = reading.evidence.snapshot.layers
    errors = [relative(layers[i][name][again.rows], own[name]) for i, own in enumerate(again.layers) for name in own]
    worst = float(torch.cat(errors).max())  # NaN stays NaN
    return (math.log10(worst + 1e-6),)


SENDER_TAIL = Signal(
    ("sender_tail",), _read, ("sender_tail",), "log10 of the worst relative error of the sender's last tokens, run again",
    integrity=True,
)  # fmt: skip
