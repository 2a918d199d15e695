"""What prefill, translation and repair cost, in FLOPs, from one model (2 FLOPs per multiply-add)."""

from __future__ import annotations

from kvbridge.geometry import KVGeometry


def forward_flops(
    geometry: KVGeometry,
    new_tokens: int,
    context_tokens: int,
    *,
    layers: int | None = None,
    head: bool = False,
) -> int:
    """FLOPs of `new_tokens` after `context_tokens` cached ones through the first `layers` layers (all by default).

    Weights: 2 per parameter and token (embeddings are looked up, not multiplied). Attention: scores and mix, 4 per
    query head, width and attended token, within each layer's window. `head` adds the language-model head of one token.
    """
    used = geometry.layers if layers is None else geometry.layers[:layers]
    total = 2 * geometry.layer_parameters * len(used) // len(geometry.layers) * new_tokens
    for layer in used:
        attended = _attended(new_tokens, context_tokens, layer.window_tokens)
        total += 4 * geometry.attention_heads * layer.streams[-1].width * attended
    if head:
        total += 2 * geometry.hidden_size * geometry.vocabulary
    return total


def translation_flops(parameters: int, tokens: int) -> int:
    """FLOPs of applying maps with `parameters` numbers to `tokens` tokens."""
    return 2 * parameters * tokens


def handoff_flops(
    receiver: KVGeometry,
    tokens: int,
    *,
    translator_parameters: int = 0,
    translated: int = 0,
    first_layers: int = 0,
    recomputed: int = 0,
) -> int:
    """FLOPs from a sender's cache to the receiver's first logits over `tokens` prompt tokens.

    `translated` tokens through the maps, all tokens through the first layers, `recomputed` cached tokens and the last
    one through the whole receiver.
    """
    first = forward_flops(receiver, tokens, 0, layers=first_layers) if first_layers else 0
    repair = forward_flops(receiver, recomputed, max(0, tokens - 1 - recomputed))
    last = forward_flops(receiver, 1, tokens - 1, head=True)
    return translation_flops(translator_parameters, translated) + first + repair + last


def prefill_flops(receiver: KVGeometry, tokens: int) -> int:
    """FLOPs of the receiver's own prefill up to its first logits."""
    return forward_flops(receiver, tokens, 0, head=True)


def _attended(new: int, context: int, window: int | None) -> int:
    """Sum over the new tokens of how many tokens each attends to, itself included."""
    if window is None:
        return new * context + new * (new + 1) // 2
    return sum(min(context + i + 1, window) for i in range(new))
