"""How well the sender's tokens meet the receiver's: a part of the contract, as numbers. Costs
nothing."""

from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.reading import Reading


def _read(reading: Reading) -> tuple[float, ...]:
    evidence = reading.evidence
    alignment = evidence.alignment
    # What the receiver had before the handoff reads no sender row, and needs none.
    handed = alignment.covered[evidence.start :]
    return 1.0 - alignment.exact_share, 1.0 - float(handed.double().mean())


ALIGNMENT = Signal(
    ("inexact_ends", "uncovered"),
    _read,
    (),
    "share of receiver tokens that end inside a sender token, or have none",
)
