"""Does the sender's cache follow from itself? Its last tokens through its first layers only,
against the snapshot.

The next layer's K/V of those tokens have seen every row before them that the first layers' windows
reach: one edited row moves them, and so does a first layer that is of another text. What was
changed in later layers only is `sender_tail`'s to see. Costs nine tokens through an eighth of the
sender.
"""

from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.costs import SENDER_EARLY_RUN
from kvbridge.gates.signals.reading import Reading
from kvbridge.gates.signals.residuals import worst


def _read(reading: Reading) -> tuple[float, ...]:
    rows, again = reading.sender_early
    return (worst(reading.evidence.snapshot, rows, again),)


SENDER_EARLY = Signal(
    ("sender_early",),
    _read,
    (SENDER_EARLY_RUN,),
    "log10 of the worst relative error of the sender's last tokens in its first layers, run again",
    integrity=True,
)
