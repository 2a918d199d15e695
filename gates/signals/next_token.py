"""Entropy and margin of the next token, under the translated cache and as the sender sees it.

Costs one receiver token with its head; the sender's view costs nine sender tokens (shared).
"""

import torch
from torch import Tensor

from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.costs import NEXT_TOKEN_RUN, SENDER_TAIL_RUN
from kvbridge.gates.signals.reading import Reading


def doubt_of(logs: Tensor) -> tuple[float, float]:
    """Entropy in nats and log-odds of the first over the second choice, negated: high when
    unsure."""
    # p log p of an impossible token is 0 · −∞: no doubt, so 0.
    entropy = -float((logs.exp() * logs).nan_to_num().sum())
    best = torch.topk(logs, 2).values
    return entropy, -float(best[0] - best[1])


def _read(reading: Reading) -> tuple[float, ...]:
    return doubt_of(reading.next_logs)


def _sender(reading: Reading) -> tuple[float, ...]:
    return doubt_of(reading.sender_tail.logs[-1])


NEXT_TOKEN = Signal(
    ("entropy", "unsure"),
    _read,
    (NEXT_TOKEN_RUN,),
    "entropy and negated margin of the translated next-token distribution",
)
SENDER_NEXT = Signal(
    ("sender_entropy", "sender_unsure"),
    _sender,
    (SENDER_TAIL_RUN,),
    "the same of the sender's own distribution",
    default=False,
)
