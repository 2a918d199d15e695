"""What the translation's usual residuals do to attention outputs, given this request's own queries, keys and values.

The queries are the recomputed tail's, taken from the repair. Rows that the receiver computed itself count as exact. Costs
one attention of a few tokens, about three times over.
"""

import math

import torch

from kvbridge.gates.signals.attention import expected_error
from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.costs import QUERIES
from kvbridge.gates.signals.reading import Inapplicable, Reading


def _read(reading: Reading) -> tuple[float, ...]:
    e, extras = reading.evidence, reading.extras
    if not extras.residual_k:
        raise Inapplicable("no residual covariance was fitted")
    positions = reading.tail[-QUERIES:]
    rows = torch.searchsorted(e.chosen, positions)
    uncertain = torch.ones(len(e.ids) - 1)
    uncertain[e.chosen] = 0
    reading.spend("attention_error")
    found = []
    for layer in range(e.exact_layers, len(e.repaired)):
        queries = e.queries.at(layer, rows, positions)
        if queries is None or layer not in extras.residual_k:
            continue
        window = e.receiver.geometry.layers[layer].window_tokens
        first = 0 if window is None else max(0, int(positions[0]) - window + 1)
        seen = torch.arange(first, int(positions[-1]) + 1)
        distance = positions[:, None] - seen[None]
        allowed = (distance >= 0) & (distance < (window or len(e.ids)))
        part = slice(first, int(positions[-1]) + 1)
        device = queries.device
        error, squared = expected_error(
            queries,
            e.repaired[layer]["k"][part].float(),
            e.repaired[layer]["v"][part].float(),
            allowed.to(device),
            uncertain[part].to(device),
            extras.residual_k[layer].to(device),
            extras.residual_v[layer].to(device),
        )
        found.append(float((error.sum(1) / squared.sum(1).clamp_min(1e-12)).mean()))
    if not found:
        raise Inapplicable("this receiver's attention gives no queries")
    return math.log(sum(found) / len(found) + 1e-9), math.log(max(found) + 1e-9)


ATTENTION_ERROR = Signal(
    ("attention_error", "attention_worst"),
    _read,
    ("attention_error",),
    "log expected squared error of the tail's attention outputs over their square: mean over layers, and the worst layer",
)
