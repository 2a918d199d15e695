"""What was decided about one request, and why. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvbridge.codec import check_fields
from kvbridge.errors import UsageError

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
    "positions": "the snapshot's rows stand at other positions than the receiver's",
    "positions_out_of_range": "the prompt is longer than the receiver's positions",
    "not_finite": "the cache holds NaN or infinity",
    "no_room": "the ledger has no room",
    "disabled": "switched off",
    "timeout": "the gate did not answer in time",
    "fault": "an expected fault on the way",
}


@dataclass(frozen=True)
class Decision:
    """What may be done with one translated cache, and why. `reason` is a key of REASONS, `detail`
    says what was found.

    `predicted_flops` and `predicted_ms` are of the translated path; None where nothing was
    predicted.
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
        check_fields(self)
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
