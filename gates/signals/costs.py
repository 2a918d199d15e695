"""What a gate's work costs, in FLOPs: the same functions count a decision and predict one.

Work that one signal alone does has its `GatePart` in that signal's file; here are the parts that
`Reading` does for several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbridge.geometry import KVGeometry
from kvbridge.handoff.cost import forward_flops

KNOWN, SAMPLED, SENDER_ROWS = 8, 64, 512
EARLY = 8
BUDGET = 0.02


@dataclass(frozen=True)
class Shape:
    """What the costs depend on: both models, the prompt's tokens as the receiver cuts it, rows of
    what was fitted. `sender_tokens`: those of the sender's snapshot, which may be of a beginning
    only; None: as many."""

    sender: KVGeometry
    receiver: KVGeometry
    tokens: int
    basis_numbers: int = 0
    halves_parameters: int = 0
    first_maps_flops: int = 0
    sender_tokens: int | None = None

    @property
    def cached(self) -> int:
        """Tokens of the sender's snapshot."""
        return self.tokens if self.sender_tokens is None else self.sender_tokens

    @property
    def again(self) -> int:
        """Of these, the last ones that the sender runs again."""
        return min(KNOWN + 1, self.cached - 1)


@dataclass(frozen=True)
class GatePart:
    """One piece of a gate's work and its FLOPs. Signals that need the same piece name the same
    object: it is done and paid for once. `name` is what counts and tables call it, and no other
    part's."""

    name: str
    flops: Callable[[Shape], int]


def head_flops(geometry: KVGeometry, tokens: int) -> int:
    """The language-model head over `tokens` states."""
    return 2 * geometry.hidden_size * geometry.vocabulary * tokens


def projection_flops(geometry: KVGeometry, layer: int, tokens: int) -> int:
    """Queries, keys and values of one layer, before its attention (models compute all three before
    they cache)."""
    keys, values = geometry.layers[layer].stream("k"), geometry.layers[layer].stream("v")
    outputs = geometry.attention_heads * keys.width + keys.features + values.features
    return 2 * geometry.hidden_size * outputs * tokens


def early_layers(geometry: KVGeometry) -> int:
    """Whole layers that `sender_early` runs: an eighth of them, at least one, never the last."""
    return min(max(1, len(geometry.layers) // EARLY), len(geometry.layers) - 1)


def _sender_tail(shape: Shape) -> int:
    before = shape.cached - shape.again
    return forward_flops(shape.sender, shape.again, before) + head_flops(shape.sender, shape.again)


def _sender_early(shape: Shape) -> int:
    whole = early_layers(shape.sender)
    run = forward_flops(shape.sender, shape.again, shape.cached - shape.again, layers=whole)
    return run + projection_flops(shape.sender, whole, shape.again)


def _sender_first(shape: Shape) -> int:
    return projection_flops(shape.sender, 0, min(SENDER_ROWS, shape.cached))


def _receiver_head(shape: Shape) -> int:
    return head_flops(shape.receiver, min(KNOWN, shape.tokens))


def _next_token(shape: Shape) -> int:
    return forward_flops(shape.receiver, 1, shape.tokens - 1, head=True)


SENDER_TAIL_RUN = GatePart("sender_tail", _sender_tail)
"""The sender runs its last known tokens once more over its own cache, head included."""

SENDER_EARLY_RUN = GatePart("sender_early", _sender_early)
"""The sender's last known tokens through its first layers, over the rows before them, and the next
layer's K/V."""

SENDER_FIRST_RUN = GatePart("sender_first", _sender_first)
"""K/V of the sender's first layer for sampled tokens."""

RECEIVER_HEAD = GatePart("receiver_head", _receiver_head)
"""The receiver's head over the known tokens that were recomputed anyway."""

NEXT_TOKEN_RUN = GatePart("next_token", _next_token)
"""One token through the receiver, with its head: whoever goes on from the cache runs it again."""
