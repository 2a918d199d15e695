"""Every condition that is judged against what it is compared with, item by item."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbridge.eval.conditions.names import against, is_subject, needed, ordered
from kvbridge.eval.statistics.bootstrap import Interval
from kvbridge.eval.statistics.metrics import Metric, metric_of
from kvbridge.eval.statistics.table import Table, bounds, number


@dataclass(frozen=True)
class Rules:
    """Thresholds of the verdict, as shares."""

    retention_min: float = 0.90
    harm_max: float = 0.02
    prefill_share_max: float = 1.0
    accepted_min: float = 0.10
    documents_min: int = 10


DEFAULT_RULES = Rules()


@dataclass(frozen=True)
class Contrast:
    """One paired comparison; `difference` is positive where `condition` is better than
    `against`."""

    condition: str
    against: str
    task: str
    metric: Metric
    difference: Interval
    items: int
    documents: int

    def wins(self, rules: Rules) -> bool:
        """Whether the condition is better, beyond the interval and on enough documents."""
        return self.documents >= rules.documents_min and self.difference.above(0)

    def loses(self, rules: Rules) -> bool:
        """Whether it is worse."""
        return self.documents >= rules.documents_min and self.difference.below(0)

    def words(self) -> str:
        """The difference with its interval and unit."""
        low, middle, high = (
            self._written(value)
            for value in (self.difference.low, self.difference.estimate, self.difference.high)
        )
        ci = f"[{low}, {high}]" if self.difference.known else "(no interval)"
        return f"{middle} {ci} {self.metric.unit} in {self.task}, n = {self.items}"

    def _written(self, value: float) -> str:
        text = f"{value * self.metric.scale:+.{self.metric.places}f}"
        return text.replace("-", "\N{MINUS SIGN}")

    def as_dict(self, rules: Rules) -> dict[str, Any]:
        """As in the summary."""
        return {
            "condition": self.condition,
            "against": self.against,
            "task": self.task,
            "metric": self.metric.column,
            "difference": number(self.difference.estimate),
            "difference_ci": bounds(self.difference),
            "p": number(self.difference.p),
            "n": self.items,
            "documents": self.documents,
            "beats": self.wins(rules),
        }


def contrast(table: Table, condition: str, other: str) -> Contrast | None:
    """`condition` against `other`; None where they share no items."""
    metric = metric_of(table)
    advantage = metric.advantage(table, condition, other)
    if advantage is None:
        return None
    items = table.items([condition, other], metric.column)
    documents = len(set(table.documents(condition, items)))
    return Contrast(condition, other, table.task, metric, *advantage, documents)


def subjects(table: Table) -> list[str]:
    """Conditions of `table` that are judged: translations at any tail, and gated."""
    return [name for name in ordered(table.cells) if is_subject(name)]


def all_contrasts(tables: Mapping[str, Table]) -> tuple[list[Contrast], list[tuple[str, str, str]]]:
    """Per task every translation and gated against its controls at the same tail, and each against
    the sender; and (task, condition, control) of comparisons whose control was not run."""
    made: list[Contrast] = []
    not_run: list[tuple[str, str, str]] = []
    for task, table in tables.items():
        for condition in subjects(table):
            tails = table.tails(condition)
            for other in against(condition, *tails):
                one = contrast(table, condition, other)
                if one is not None:
                    made.append(one)
                elif other in needed(condition, *tails):
                    not_run.append((task, condition, other))
        for condition in (*subjects(table), "native"):
            one = contrast(table, condition, "sender")
            if one is not None:
                made.append(one)
    return made, not_run
