"""Nats per character of the known tail under the translated cache, and minus the sender's own on
the same text's end.

Costs the receiver's head over the known tokens, and nine sender tokens (shared).
"""

from torch import Tensor

from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.costs import KNOWN, RECEIVER_HEAD, SENDER_TAIL_RUN
from kvbridge.gates.signals.reading import Reading


def _nats(logs: Tensor, following: Tensor) -> float:
    """Nats of `following` `[n]` under log probabilities `[n, vocabulary]`."""
    return -float(logs.gather(1, following[:, None].to(logs.device)).sum())


def _read(reading: Reading) -> tuple[float, ...]:
    evidence = reading.evidence
    receiver_nats = _nats(*reading.receiver_tail_logs)
    # Over characters, not tokens: the two models cut the same end of the text differently.
    spans, rows = evidence.spans, reading.tail[-KNOWN:]
    receiver = receiver_nats / max(1, int(spans[rows[-1] + 1, 1] - spans[rows[0], 1]))

    again, snapshot = reading.sender_tail, evidence.snapshot
    ends = snapshot.spans[again.rows, 1]
    sender_nats = _nats(again.logs[:-1], snapshot.token_ids[again.rows[1:]])
    sender = sender_nats / max(1, int(ends[-1] - ends[0]))
    return receiver, sender, receiver - sender


TAIL_LOSS = Signal(
    ("receiver_loss", "sender_loss", "loss_gap"),
    _read,
    (RECEIVER_HEAD, SENDER_TAIL_RUN),
    "nats per character of the known tail: receiver under the translated cache, sender, difference",
    default=False,
)
