"""Nats per character of the known tail under the translated cache, and minus the sender's own on the same text's end.

Costs the receiver's head over the known tokens, and nine sender tokens (shared).
"""

from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.reading import KNOWN, Reading


def _read(reading: Reading) -> tuple[float, ...]:
    e = reading.evidence
    logs, following = reading.receiver_tail_logs
    spans = e.spans
    rows = reading.tail[-KNOWN:]
    ours = -float(logs.gather(1, following[:, None].to(logs.device)).sum())
    receiver = ours / max(1, int(spans[rows[-1] + 1, 1] - spans[rows[0], 1]))
    again = reading.sender_tail
    targets = e.snapshot.token_ids[again.rows[1:]]
    theirs = -float(again.logs[:-1].gather(1, targets[:, None].to(again.logs.device)).sum())
    ends = e.snapshot.spans[again.rows, 1]
    sender = theirs / max(1, int(ends[-1] - ends[0]))
    return receiver, sender, receiver - sender


TAIL_LOSS = Signal(
    ("receiver_loss", "sender_loss", "loss_gap"),
    _read,
    ("receiver_head", "sender_tail"),
    "nats per character of the known tail: receiver under the translated cache, sender, difference",
    default=False,
)
