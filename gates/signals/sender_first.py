"""Is this cache of these tokens? The sender's layer 0, recomputed for sampled tokens, against the
snapshot's.

K and V of layer 0 depend on each token and its position alone, so any sample is checked exactly,
whatever the rest of the cache holds. Costs that layer's projections over the sampled tokens.
"""

from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.costs import SENDER_FIRST_RUN
from kvbridge.gates.signals.reading import Reading
from kvbridge.gates.signals.residuals import worst


def _read(reading: Reading) -> tuple[float, ...]:
    rows, own = reading.sender_first
    return (worst(reading.evidence.snapshot, rows, [own]),)


SENDER_FIRST = Signal(
    ("sender_first",),
    _read,
    (SENDER_FIRST_RUN,),
    "log10 of the worst relative error of the sender's layer 0, sampled tokens",
    integrity=True,
)
