"""What each part of a gate's work costs, in FLOPs: the same functions count a decision and predict one."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.geometry import KVGeometry
from kvbridge.handoff.cost import forward_flops

KNOWN, SAMPLED, FEW, QUERIES, SENDER_ROWS = 8, 64, 16, 4, 512
EARLY = 8
BUDGET = 0.02


@dataclass(frozen=True)
class Shape:
    """What the costs depend on: both models, the prompt's tokens as the receiver cuts it, rows of what was fitted.
    `sender_tokens`: those of the sender's snapshot, which may be of a beginning only; None: as many."""

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


def head_flops(geometry: KVGeometry, tokens: int) -> int:
    """The language-model head over `tokens` states."""
    return 2 * geometry.hidden_size * geometry.vocabulary * tokens


def sender_tail(shape: Shape) -> int:
    """The sender runs its last known tokens once more over its own cache, head included."""
    return forward_flops(shape.sender, shape.again, shape.cached - shape.again) + head_flops(
        shape.sender, shape.again
    )


def projection_flops(geometry: KVGeometry, layer: int, tokens: int) -> int:
    """Queries, keys and values of one layer, before its attention (models compute all three before they cache)."""
    keys, values = geometry.layers[layer].stream("k"), geometry.layers[layer].stream("v")
    return (
        2
        * geometry.hidden_size
        * (geometry.attention_heads * keys.width + keys.features + values.features)
        * tokens
    )


def early_layers(geometry: KVGeometry) -> int:
    """Whole layers that `sender_early` runs: an eighth of them, at least one, never the last."""
    return min(max(1, len(geometry.layers) // EARLY), len(geometry.layers) - 1)


def sender_early(shape: Shape) -> int:
    """The sender's last known tokens through its first layers, over the rows before them, and the next layer's K/V."""
    new, whole = shape.again, early_layers(shape.sender)
    return forward_flops(shape.sender, new, shape.cached - new, layers=whole) + projection_flops(
        shape.sender, whole, new
    )


def sender_first(shape: Shape) -> int:
    """K/V of the sender's first layer for sampled tokens."""
    return projection_flops(shape.sender, 0, min(SENDER_ROWS, shape.cached))


def receiver_head(shape: Shape) -> int:
    """The receiver's head over the known tokens that were recomputed anyway."""
    return head_flops(shape.receiver, min(KNOWN, shape.tokens))


def next_token(shape: Shape) -> int:
    """One token through the receiver, with its head: whoever goes on from the cache runs it again."""
    return forward_flops(shape.receiver, 1, shape.tokens - 1, head=True)


def first_maps(shape: Shape) -> int:
    """The translator's maps of layers that the receiver computed itself, over sampled tokens."""
    return shape.first_maps_flops * min(SAMPLED, shape.tokens)


def basis(shape: Shape) -> int:
    """Projections of sampled sender rows."""
    return 2 * shape.basis_numbers * min(SAMPLED, shape.tokens)


def halves(shape: Shape) -> int:
    """Two maps from disjoint sender layers over a few rows."""
    return 2 * shape.halves_parameters * min(FEW, shape.tokens)


def attention_error(shape: Shape) -> int:
    """Logits, mix and distances to it for a few queries of every layer, norms of the values they see, and one quadratic
    form per query."""
    total, new = 0, min(QUERIES, shape.tokens)
    for layer in shape.receiver.layers:
        keys, values = layer.stream("k"), layer.stream("v")
        seen = min(shape.tokens, layer.window_tokens or shape.tokens)
        each = seen * (2 * keys.width + 4 * values.width) + 2 * keys.width * keys.width
        total += new * shape.receiver.attention_heads * each + 2 * seen * values.features
    return total


PARTS = {
    f.__name__: f
    for f in (
        sender_tail,
        sender_early,
        sender_first,
        receiver_head,
        next_token,
        first_maps,
        basis,
        halves,
        attention_error,
    )
}
