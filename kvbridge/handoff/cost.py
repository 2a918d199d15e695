"""What prefill, translation, repair and gate cost: FLOPs from one model (2 per multiply-add),
milliseconds from a device's measured speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvbridge.errors import CorruptFile
from kvbridge.geometry import KVGeometry
from kvbridge.handoff.pair import Pair
from kvbridge.handoff.request import Request, after


def forward_flops(
    geometry: KVGeometry,
    new_tokens: int,
    context_tokens: int,
    *,
    layers: int | None = None,
    head: bool = False,
) -> int:
    """FLOPs of `new_tokens` after `context_tokens` cached ones through the first `layers` layers
    (all by default).

    Weights: 2 per parameter and token (embeddings are looked up, not multiplied). Attention: scores
    and mix, 4 per query head, width and attended token, within each layer's window. `head` adds the
    language-model head of one token.
    """
    used = geometry.layers if layers is None else geometry.layers[:layers]
    total = 2 * geometry.layer_parameters * len(used) // len(geometry.layers) * new_tokens
    for layer in used:
        attended = _attended(new_tokens, context_tokens, layer.window_tokens)
        total += 4 * geometry.attention_heads * layer.streams[-1].width * attended
    if head:
        total += 2 * geometry.hidden_size * geometry.vocabulary
    return total


def handoff_parts(
    receiver: KVGeometry,
    tokens: int,
    *,
    translator_flops: int = 0,
    translated: int = 0,
    first_layers: int = 0,
    recomputed: int = 0,
    known: int = 0,
) -> dict[str, int]:
    """FLOPs from a sender's cache to the receiver's first logits over `tokens` prompt tokens, of
    which the receiver has the first `known` already, by part.

    `translate`: `translated` tokens through the maps, at `translator_flops` each; `prefill`: the
    unknown tokens through the first layers; `repair`: `recomputed` cached tokens and the last one
    through the whole receiver.
    """
    prefill = 0
    if first_layers:
        prefill = forward_flops(receiver, tokens - known, known, layers=first_layers)
    repair = forward_flops(receiver, recomputed, max(0, tokens - 1 - recomputed))
    return {
        "translate": translator_flops * translated,
        "prefill": prefill,
        "repair": repair + forward_flops(receiver, 1, tokens - 1, head=True),
    }


def request_parts(pair: Pair, request: Request) -> dict[str, int]:
    """`handoff_parts` of one request that has been through `features`: what its plan takes alone,
    whether or not a translation of more rows was shared with other plans."""
    aligned = after("align", request.aligned)
    features = after("features", request.features)
    geometry = pair.receiver.geometry
    translator_flops = 0
    if pair.translator is not None and features.exact_layers < len(geometry.layers):
        translator_flops = pair.translator.flops()
    return handoff_parts(
        geometry,
        len(request.encoding),
        translator_flops=translator_flops,
        translated=len(request.rows),
        first_layers=0 if features.first is None else len(features.first.layers),
        recomputed=len(aligned.chosen),
        known=request.start,
    )


def prefill_flops(receiver: KVGeometry, tokens: int) -> int:
    """FLOPs of the receiver's own prefill up to its first logits."""
    return forward_flops(receiver, tokens, 0, head=True)


def _attended(new: int, context: int, window: int | None) -> int:
    """Sum over the new tokens of how many tokens each attends to, itself included."""
    if window is None:
        return new * context + new * (new + 1) // 2
    return sum(min(context + i + 1, window) for i in range(new))


@dataclass(frozen=True)
class Speed:
    """FLOPs per millisecond of one device with one pair, by part of the work, as measured
    (`kvbridge.gates.decide.timing`).

    Small matrices run far below a prefill's speed, which is why each part has its own. Another kind
    of work (moving pages between tiers) becomes a further field here and a further key of the parts
    that `ms` is given.
    """

    prefill: float
    translate: float
    repair: float
    gate: float

    def ms(self, parts: Mapping[str, int]) -> float:
        """Milliseconds of FLOPs by part; KeyError for a part without a speed."""
        rates = asdict(self)
        return sum(flops / rates[name] for name, flops in parts.items())

    def to_json(self) -> dict[str, float]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Any, name: str) -> Speed:
        """The inverse of `to_json`; raises CorruptFile for anything but four positive finite
        numbers."""
        fields = ("prefill", "translate", "repair", "gate")
        fine = isinstance(body, dict) and set(body) == set(fields)
        if not fine or not all(type(v) in (int, float) and 0 < v < 1e30 for v in body.values()):
            raise CorruptFile(
                f"{name}: expected FLOPs per millisecond as {', '.join(fields)}, found {body!r:.80}"
            )
        return cls(**{k: float(v) for k, v in body.items()})
