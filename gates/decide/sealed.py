"""The calibration as an object: thresholds and their guarantee, scores, limits and statistics,
bound to one translator."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

from msgspec import Meta

from kvbridge.codec import Count, Finite, Index, Share, ShortName, to_json
from kvbridge.errors import UsageError
from kvbridge.format import CALIBRATION, MAX_RUNGS
from kvbridge.gates.decide.guarantee import Tested
from kvbridge.gates.decide.score import Score
from kvbridge.gates.signals.extras import Extras
from kvbridge.geometry import short_name
from kvbridge.handoff.plan import RepairPlan

MAX_POSITION = (1 << 31) - 1


@dataclass(frozen=True)
class Rung:
    """One repair plan of the ladder: its score, and per column the limit above which a cache is not
    of this text."""

    plan: RepairPlan
    score: Score
    limits: dict[str, Finite]

    def __post_init__(self) -> None:
        most = max((self.plan.sinks, self.plan.tail, self.plan.layers, *self.plan.tokens))
        if most > MAX_POSITION:
            raise UsageError(f"expected a plan of positions up to {MAX_POSITION}, found {most}")


@dataclass(frozen=True)
class Statistics:
    """Which tensors of statistics stand beside a calibration: streams of centres, the sender layers
    that each of two maps reads, the receiver layers whose values they give, the receiver layers of
    residuals."""

    centre: tuple[str, ...]
    half_layers: tuple[tuple[Index, ...], tuple[Index, ...]]
    targets: tuple[Index, ...]
    residual: tuple[Index, ...]


@dataclass(frozen=True)
class SavedCalibration:
    """What calibration.json holds; `Calibration` says what its fields mean."""

    schema: str
    translator: str
    sender: str
    receiver: str
    label: str
    tau: Annotated[float, Meta(ge=0, le=1e6)] | None
    alpha: Share
    lenient_alpha: Share
    delta: Share
    signals: tuple[str, ...]
    rungs: Annotated[tuple[Rung, ...], Meta(min_length=1, max_length=MAX_RUNGS)]
    stop: Share
    strict: Tested | None
    lenient: Tested | None
    conformal: Share | None
    needed: Count
    counts: dict[str, Index]
    report: dict[str, Any]
    corpus_digest: str
    documents: frozenset[ShortName]
    extras: Statistics


SHARED = tuple(f.name for f in fields(SavedCalibration) if f.name not in ("schema", "extras"))
"""Fields that a calibration has as an object and on disk alike."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """What a gate decides by. `strict` and `lenient`: the thresholds that passed at α and at
    `lenient_alpha`, each at confidence 1 − δ, None where none did: P(damaged | score at or below
    it), so the lenient one speaks of `use` and `use_approximate` together. `stop`: a request ends
    on the first rung whose score is at most this (1 with one rung); `needed`: accepted items
    without a failure that the strict level takes. `translator`, `sender`, `receiver`: digests it is
    bound to. `documents`: names (as `short_name`) of the documents that fixed anything in it.
    `digest` is None until it is saved.
    """

    translator: str
    sender: str
    receiver: str
    label: str
    tau: float | None
    alpha: float
    lenient_alpha: float
    delta: float
    signals: tuple[str, ...]
    rungs: tuple[Rung, ...]
    stop: float
    strict: Tested | None
    lenient: Tested | None
    conformal: float | None
    needed: int
    counts: dict[str, int]
    report: dict[str, Any]
    corpus_digest: str
    documents: frozenset[str]
    extras: Extras
    digest: str | None = None

    @property
    def usable(self) -> bool:
        """Whether any level passed."""
        return self.strict is not None or self.lenient is not None

    @property
    def refusal(self) -> str:
        """Why nothing is accepted, what it takes, and how common damage is where that is known."""
        reason = (
            f"uncalibrated: of {self.counts.get('thresholds', 0)} calibration requests too few "
            f"were accepted without damage; α = {self.alpha:g} at δ = {self.delta:g} takes "
            f"{self.needed} accepted ones without a failure; calibrate on more texts (--data, a "
            "higher --limit), or with a higher --alpha or --lenient"
        )
        if self.base_rate is None:
            return reason
        damaged, items = self.base_rate
        share = f"{damaged / items:.0%} of the report part ({damaged} of {items})"
        return f"{reason}; damage is {share}"

    @property
    def base_rate(self) -> tuple[int, int] | None:
        """(damaged, all) requests of the report part, on the first rung and before any gate; None
        where it is not known."""
        damaged, items = self.report.get("damaged"), self.report.get("items")
        return (
            (damaged, items)
            if type(damaged) is int and type(items) is int and 0 <= damaged <= items > 0
            else None
        )

    def knows(self, document: str) -> bool:
        """Whether a document had a say in the statistics, the score or the thresholds: nothing
        measured on it counts."""
        return short_name(document) in self.documents

    def rung(self, plan: RepairPlan) -> Rung | None:
        """The rung of this very plan."""
        return next((r for r in self.rungs if r.plan == plan), None)

    def body(self) -> dict[str, Any]:
        """What calibration.json holds."""
        extras = Statistics(
            tuple(sorted(self.extras.centre)),
            self.extras.half_layers,
            self.extras.targets,
            tuple(self.extras.residual_k),
        )
        shared = {name: getattr(self, name) for name in SHARED}
        return to_json(SavedCalibration(schema=CALIBRATION.schema, **shared, extras=extras))
