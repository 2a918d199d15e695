"""The calibration as an object: thresholds and their guarantee, scores, limits and statistics, bound to one translator."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvbridge.format import CALIBRATION
from kvbridge.gates.decide.guarantee import Tested
from kvbridge.gates.decide.score import Score
from kvbridge.gates.signals.extras import Extras
from kvbridge.geometry import short_name
from kvbridge.handoff.plan import RepairPlan


@dataclass(frozen=True)
class Rung:
    """One repair plan of the ladder: its score, and per column the limit above which a cache is not of this text."""

    plan: RepairPlan
    score: Score
    limits: dict[str, float]


@dataclass(frozen=True, eq=False)
class Calibration:
    """What a gate decides by. `strict` and `lenient`: the thresholds that passed at α and at `lenient_alpha`, each at
    confidence 1 − δ, None where none did: P(damaged | score at or below it), so the lenient one speaks of `use` and
    `use_approximate` together. `stop`: a request ends on the first rung whose score is at most this (1 with one rung);
    `needed`: accepted items without a failure that the strict level takes.
    `translator`, `sender`, `receiver`: digests it is bound to. `documents`: names (as `short_name`) of the documents that
    fixed anything in it. `digest` is None until it is saved.
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
        rate = self.base_rate
        return (
            f"uncalibrated: of {self.counts.get('thresholds', 0)} calibration requests too few were accepted without "
            f"damage; α = {self.alpha:g} at δ = {self.delta:g} takes {self.needed} accepted ones without a failure; "
            "calibrate on more texts (--data, a higher --limit), or with a higher --alpha or --lenient"
            + (
                ""
                if rate is None
                else f"; damage is {rate[0] / rate[1]:.0%} of the report part ({rate[0]} of {rate[1]})"
            )
        )

    @property
    def base_rate(self) -> tuple[int, int] | None:
        """(damaged, all) requests of the report part, on the first rung and before any gate; None where it is not known."""
        damaged, items = self.report.get("damaged"), self.report.get("items")
        return (
            (damaged, items)
            if type(damaged) is int and type(items) is int and 0 <= damaged <= items > 0
            else None
        )

    def knows(self, document: str) -> bool:
        """Whether a document had a say in the statistics, the score or the thresholds: nothing measured on it counts."""
        return short_name(document) in self.documents

    def rung(self, plan: RepairPlan) -> Rung | None:
        """The rung of this very plan."""
        return next((r for r in self.rungs if r.plan == plan), None)

    def body(self) -> dict[str, Any]:
        """What calibration.json holds."""
        return {
            "schema": CALIBRATION.schema,
            "translator": self.translator,
            "sender": self.sender,
            "receiver": self.receiver,
            "label": self.label,
            "tau": self.tau,
            "alpha": self.alpha,
            "lenient_alpha": self.lenient_alpha,
            "delta": self.delta,
            "signals": list(self.signals),
            "rungs": [
                {
                    "plan": {**asdict(r.plan), "tokens": list(r.plan.tokens)},
                    "score": r.score.to_json(),
                    "limits": r.limits,
                }
                for r in self.rungs
            ],
            "stop": self.stop,
            "strict": _tested(self.strict),
            "lenient": _tested(self.lenient),
            "conformal": self.conformal,
            "needed": self.needed,
            "counts": self.counts,
            "report": self.report,
            "corpus_digest": self.corpus_digest,
            "documents": sorted(self.documents),
            "extras": {
                "centre": sorted(self.extras.centre),
                "half_layers": [list(x) for x in self.extras.half_layers],
                "targets": list(self.extras.targets),
                "residual": list(self.extras.residual_k),
            },
        }


def _tested(level: Tested | None) -> dict[str, Any] | None:
    return None if level is None else asdict(level)
