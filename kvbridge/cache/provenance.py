"""Where every cached value came from, and what was decided about using it. No torch.

Exact: what the receiver computes itself from exact inputs alone. The last bits may still differ from a prefill's where it
came from a forward over fewer tokens, which rounds in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from kvbridge.errors import CorruptFile, UsageError

FIDELITIES = ("approximate", "repaired", "exact")
Verdict = Literal["use", "use_approximate", "discard"]

REASONS = {
    "exact": "every cached value is what the receiver computes itself",
    "ungated": "no gate was given: translated, with no calibrated risk",
    "gate_strict": "the calibrated risk of the strict level holds",
    "gate_lenient": "the calibrated risk of the lenient level only holds",
    "gate_refused": "the gate's score is above its thresholds",
    "uncalibrated": "the gate has no valid calibration",
    "no_asset": "no translator for this pair",
    "wrong_pair": "the snapshot is not from the sender that this translator was fitted for",
    "contract_mismatch": "a model differs from the one the translator was fitted for",
    "text_mismatch": "the snapshot is not of this text",
    "tokenizer_mismatch": "the snapshot has no text and the tokenizers differ",
    "alignment": "too few receiver tokens end where a sender token ends",
    "lineage": "the snapshot is itself a translation",
    "too_short": "there is nothing to translate",
    "positions_out_of_range": "the prompt is longer than the receiver's positions",
    "not_finite": "the cache holds NaN or infinity",
    "no_room": "the ledger has no room",
    "disabled": "switched off",
    "timeout": "the gate did not answer in time",
    "fault": "an expected fault on the way",
}


@dataclass(frozen=True)
class Decision:
    """What may be done with one translated cache, and why. `reason` is a key of REASONS, `detail` says what was found.

    `predicted_flops` and `predicted_ms` are of the translated path; None where nothing was predicted.
    """

    verdict: Verdict
    reason: str
    detail: str = ""
    score: float | None = None
    threshold: float | None = None
    calibration: str | None = None
    predicted_flops: int | None = None
    predicted_ms: float | None = None

    def __post_init__(self) -> None:
        if self.reason not in REASONS:
            raise UsageError(
                f"expected one of {', '.join(REASONS)} as a reason, found {self.reason!r}"
            )
        if self.verdict not in ("use", "use_approximate", "discard"):
            raise UsageError(
                f"expected use, use_approximate or discard as a verdict, found {self.verdict!r}"
            )

    @property
    def accepted(self) -> bool:
        """Whether the translated cache is used at all."""
        return self.verdict != "discard"

    def __str__(self) -> str:
        return f"{self.verdict} ({self.reason}): {self.detail or REASONS[self.reason]}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def discard(reason: str, detail: str = "") -> Decision:
    """A refusal of one request."""
    return Decision("discard", reason, detail)


@dataclass(frozen=True)
class Span:
    """Fidelity of layers `[layers[0], layers[1])` over cached tokens `[tokens[0], tokens[1])`."""

    layers: tuple[int, int]
    tokens: tuple[int, int]
    fidelity: str


@dataclass(frozen=True)
class Provenance:
    """Producer and receiver (geometry digests), translator digest, how many translations deep, and fidelity per
    (layers, tokens) rectangle; the rectangles cover every cached value exactly once.
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
        """Fidelity of one layer's value for one cached token; raises UsageError outside the cache."""
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
        """The same after a cache of `layers` layers has grown to `tokens` tokens: what came since was computed on top."""
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
            **asdict(replace(self, spans=())),
            "spans": [[*s.layers, *s.tokens, s.fidelity] for s in self.spans],
        }

    @classmethod
    def from_json(cls, body: Any) -> Provenance:
        """Raises CorruptFile when it is not what `to_json` writes."""
        try:
            if set(body) != {"producer", "receiver", "translator", "depth", "spans"}:
                raise ValueError("unexpected or missing fields")
            spans = tuple(Span((a, b), (c, d), f) for a, b, c, d, f in body["spans"])
            numbers = [body["depth"], *(n for s in spans for n in (*s.layers, *s.tokens))]
            if any(type(n) is not int or not 0 <= n < 1 << 63 for n in numbers):
                raise ValueError("depth or spans out of range")
            if any(s.fidelity not in FIDELITIES for s in spans):
                raise ValueError("unknown fidelity")
            producer, receiver, translator = body["producer"], body["receiver"], body["translator"]
            if (
                type(producer) is not str
                or type(receiver) is not str
                or type(translator) not in (str, type(None))
            ):
                raise ValueError("expected digests")
            return cls(producer, receiver, translator, body["depth"], spans)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFile(
                f"expected the provenance of a cache, found something else: {repr(error)[:200]}"
            ) from error


def exact_provenance(geometry_digest: str, layers: int, tokens: int) -> Provenance:
    """Of a model's own prefill."""
    spans = (Span((0, layers), (0, tokens), "exact"),) if layers and tokens else ()
    return Provenance(geometry_digest, geometry_digest, None, 0, spans)


def spans_of(matrix: Sequence[Sequence[int]]) -> tuple[Span, ...]:
    """Rectangles that cover `matrix[layer][token]` of indices into FIDELITIES: runs of equal layers, then of tokens."""
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
