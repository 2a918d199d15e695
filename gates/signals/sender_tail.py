"""Does the sender's cache follow from itself? Its last tokens, run again over the rows before them,
against the snapshot.

Costs a forward of nine sender tokens, far more than the default set may, shared with the sender's
loss and its next token.
"""

from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.costs import SENDER_TAIL_RUN
from kvbridge.gates.signals.reading import Reading
from kvbridge.gates.signals.residuals import worst

ALL_LAYERS = 4
"""Times the rounding of the first layers, after all of them."""


def _read(reading: Reading) -> tuple[float, ...]:
    again = reading.sender_tail
    return (worst(reading.evidence.snapshot, again.rows, again.layers, roundings=ALL_LAYERS),)


SENDER_TAIL = Signal(
    ("sender_tail",),
    _read,
    (SENDER_TAIL_RUN,),
    "log10 of the worst relative error of the sender's last tokens, run again",
    integrity=True,
    default=False,
)
