"""How well the sender's tokens meet the receiver's: a part of the contract, as numbers. Costs
nothing."""

from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.reading import Reading


def _read(reading: Reading) -> tuple[float, ...]:
    alignment = reading.evidence.alignment
    return 1.0 - alignment.exact_share, 1.0 - float(alignment.covered.double().mean())


ALIGNMENT = Signal(
    ("inexact_ends", "uncovered"),
    _read,
    (),
    "share of receiver tokens that end inside a sender token, or have none",
)
