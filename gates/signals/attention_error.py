"""What the translation's usual residuals do to attention outputs, given this request's own queries,
keys and values.

The queries are the recomputed tail's, taken from the repair. Rows that the receiver computed itself
count as exact, whether in the repair or before the handoff. Costs one attention of a few tokens,
about three times over.
"""

import math

import torch
from torch import Tensor

from kvbridge.gates.signals.attention import expected_error
from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.costs import GatePart, Shape
from kvbridge.gates.signals.reading import Inapplicable, Reading

QUERIES = 4


def _flops(shape: Shape) -> int:
    """Logits, mix and distances to it for a few queries of every layer, norms of the values they
    see, and one quadratic form per query."""
    total, new = 0, min(QUERIES, shape.tokens)
    for layer in shape.receiver.layers:
        keys, values = layer.stream("k"), layer.stream("v")
        seen = min(shape.tokens, layer.window_tokens or shape.tokens)
        each = seen * (2 * keys.width + 4 * values.width) + 2 * keys.width * keys.width
        total += new * shape.receiver.attention_heads * each + 2 * seen * values.features
    return total


FEW_ATTENTIONS = GatePart("attention_error", _flops)


def _read(reading: Reading) -> tuple[float, ...]:
    evidence = reading.evidence
    if not reading.extras.residual_k:
        raise Inapplicable("no residual covariance was fitted")
    positions = reading.tail[-QUERIES:]
    uncertain = torch.ones(len(evidence.ids) - 1)
    uncertain[: evidence.start] = 0
    uncertain[evidence.chosen] = 0
    reading.spend(FEW_ATTENTIONS)
    shares = []
    for layer in range(evidence.exact_layers, len(evidence.repaired)):
        share = _layer_share(reading, layer, positions, uncertain)
        if share is not None:
            shares.append(share)
    if not shares:
        raise Inapplicable("this receiver's attention gives no queries")
    return math.log(sum(shares) / len(shares) + 1e-9), math.log(max(shares) + 1e-9)


def _layer_share(
    reading: Reading, layer: int, positions: Tensor, uncertain: Tensor
) -> float | None:
    """Expected squared error of one layer's outputs over their square, at `positions` `[n]`;
    `uncertain` `[cached]` marks translated rows. None where the layer gives no queries or has no
    residuals."""
    evidence, extras = reading.evidence, reading.extras
    rows = torch.searchsorted(evidence.chosen, positions)
    queries = evidence.queries.at(layer, rows, positions)
    if queries is None or layer not in extras.residual_k:
        return None
    # Only rows that some query's window reaches take part: a sliding layer costs its window, not
    # the prompt.
    window = evidence.receiver.geometry.layers[layer].window_tokens
    first = 0 if window is None else max(0, int(positions[0]) - window + 1)
    last = int(positions[-1])
    distance = positions[:, None] - torch.arange(first, last + 1)[None]
    allowed = (distance >= 0) & (distance < (window or len(evidence.ids)))
    reached = slice(first, last + 1)
    device = queries.device
    error, squared = expected_error(
        queries,
        evidence.repaired[layer]["k"][reached].float(),
        evidence.repaired[layer]["v"][reached].float(),
        allowed.to(device),
        uncertain[reached].to(device),
        extras.residual_k[layer].to(device),
        extras.residual_v[layer].to(device),
    )
    # Summed over heads before dividing: a head whose output is nearly zero would otherwise decide
    # alone.
    return float((error.sum(1) / squared.sum(1).clamp_min(1e-12)).mean())


ATTENTION_ERROR = Signal(
    ("attention_error", "attention_worst"),
    _read,
    (FEW_ATTENTIONS,),
    "log expected squared error of the tail's attention outputs over their square: mean over "
    "layers, and the worst layer",
)
