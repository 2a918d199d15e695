"""Where every cached value came from. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from kvbridge.codec import Index, convert, one_of
from kvbridge.errors import UsageError

FIDELITIES = ("approximate", "repaired", "exact")
"""Of cached values, the lowest first.

`exact`: what the receiver computes itself, from exact inputs alone, in its own dtype. Bit for bit a
prefill's where the forward was cut alike; a forward over other tokens at a time (token by token, in
pieces, in a batch) sums in another order, and its values are equal up to the rounding of the dtype:
relative to a row's length about 1e-5 in fp32, 5e-3 in fp16 and 5e-2 in bf16 at most, of which a
greedy continuation notices nothing in fp32, and a near tie between two tokens in bf16. A cache that
a caller gives is checked against bounds of that kind, by dtype and layer
(`cache.verify.CACHE_ROUNDING`): the median row to some three times what was measured, any row to
some four. Rounding that is no coarser than the dtype's own cannot be told from it: int8 values in
the upper layers of a bf16 model.

`repaired`: computed by the receiver on top of values that are not exact.

`approximate`: translated, or given by a caller and not checked.
"""


@dataclass(frozen=True)
class Span:
    """Fidelity of layers `[layers[0], layers[1])` over cached tokens `[tokens[0], tokens[1])`."""

    layers: tuple[int, int]
    tokens: tuple[int, int]
    fidelity: str


@dataclass(frozen=True)
class Provenance:
    """Producer and receiver (geometry digests), translator digest, how many translations deep, and
    fidelity per (layers, tokens) rectangle; the rectangles cover every cached value exactly once.
    """

    producer: str
    receiver: str
    translator: str | None
    depth: int
    spans: tuple[Span, ...]

    @property
    def fidelity(self) -> str:
        """The lowest fidelity of any part; an empty cache is exact."""
        return FIDELITIES[
            min((FIDELITIES.index(s.fidelity) for s in self.spans), default=len(FIDELITIES) - 1)
        ]

    def at(self, layer: int, token: int) -> str:
        """Fidelity of one layer's value for one cached token; raises UsageError outside the
        cache."""
        if not isinstance(layer, int) or not isinstance(token, int):
            kinds = f"{type(layer).__name__} and {type(token).__name__}"
            raise UsageError(f"expected a layer and a token by number, found {kinds}")
        for span in self.spans:
            if (
                span.layers[0] <= layer < span.layers[1]
                and span.tokens[0] <= token < span.tokens[1]
            ):
                return span.fidelity
        raise UsageError(f"layer {layer}, token {token} is not in this cache")

    def covers(self, layers: int, tokens: int) -> bool:
        """Whether the rectangles cover each of `layers` × `tokens` values exactly once."""
        seen = [bytearray(tokens) for _ in range(layers)]
        left = layers * tokens
        for span in self.spans:
            (first, last), (start, stop) = span.layers, span.tokens
            left -= max(0, last - first) * max(0, stop - start)
            if not (first <= last <= layers and start <= stop <= tokens) or left < 0:
                return False
            for row in seen[first:last]:
                if any(row[start:stop]):
                    return False
                row[start:stop] = b"\1" * (stop - start)
        return left == 0

    def share(self, fidelity: str) -> float:
        """Share of (layer, token) cells of that fidelity."""
        area = {f: 0 for f in FIDELITIES}
        for s in self.spans:
            area[s.fidelity] += (s.layers[1] - s.layers[0]) * (s.tokens[1] - s.tokens[0])
        return area[fidelity] / max(1, sum(area.values()))

    def over(self, layers: int, tokens: int) -> Provenance:
        """The same after a cache of `layers` layers has grown to `tokens` tokens: what came since
        was computed on top."""
        known = max((s.tokens[1] for s in self.spans), default=0)
        if tokens <= known:
            return self
        grown = Span(
            (0, layers), (known, tokens), "exact" if self.fidelity == "exact" else "repaired"
        )
        return replace(self, spans=(*self.spans, grown))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` is its inverse."""
        return {
            "producer": self.producer,
            "receiver": self.receiver,
            "translator": self.translator,
            "depth": self.depth,
            "spans": [[*s.layers, *s.tokens, s.fidelity] for s in self.spans],
        }

    @classmethod
    def from_json(cls, body: object, name: str = "provenance of a cache") -> Provenance:
        """Raises CorruptFile naming `name` when it is not what `to_json` writes."""
        saved = convert(body, SavedProvenance, name)
        spans = tuple(Span((a, b), (c, d), fidelity) for a, b, c, d, fidelity in saved.spans)
        return cls(saved.producer, saved.receiver, saved.translator, saved.depth, spans)


Rectangle = tuple[Index, Index, Index, Index, Annotated[str, one_of(*FIDELITIES)]]
"""A span on disk: first and last layer, first and last token, fidelity."""


@dataclass(frozen=True)
class SavedProvenance:
    """A provenance on disk."""

    producer: str
    receiver: str
    translator: str | None
    depth: Index
    spans: tuple[Rectangle, ...]


def exact_provenance(geometry_digest: str, layers: int, tokens: int) -> Provenance:
    """Of a model's own prefill."""
    spans = (Span((0, layers), (0, tokens), "exact"),) if layers and tokens else ()
    return Provenance(geometry_digest, geometry_digest, None, 0, spans)


def lowered(provenance: Provenance) -> Provenance:
    """The same, of a cache that nobody has checked: all of it `approximate`."""
    spans = tuple(replace(span, fidelity="approximate") for span in provenance.spans)
    return replace(provenance, spans=spans)


def spans_of(matrix: Sequence[Sequence[int]]) -> tuple[Span, ...]:
    """Rectangles that cover `matrix[layer][token]` of indices into FIDELITIES: runs of equal
    layers, then of tokens."""
    spans: list[Span] = []
    layer = 0
    while layer < len(matrix):
        end = layer + 1
        while end < len(matrix) and list(matrix[end]) == list(matrix[layer]):
            end += 1
        row, token = list(matrix[layer]), 0
        while token < len(row):
            stop = token + 1
            while stop < len(row) and row[stop] == row[token]:
                stop += 1
            spans.append(Span((layer, end), (token, stop), FIDELITIES[row[token]]))
            token = stop
        layer = end
    return tuple(spans)
