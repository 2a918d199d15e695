"""What the items of a task are compared by: what each comparison is made of, and the words for it.

A task names its metric; everything that differs between nats and answers is said here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kvbridge.eval.statistics.bootstrap import FloatArray, Interval, NotShown, ratio_interval
from kvbridge.eval.statistics.means import Clusters, difference, without_bounds
from kvbridge.eval.statistics.outcomes import identity, items_for_half_width, mcnemar_exact
from kvbridge.eval.statistics.ratios import floor_normalised, retention
from kvbridge.eval.statistics.table import Table, figure, number
from kvbridge.eval.tasks import TASKS


@dataclass(frozen=True)
class Metric(ABC):
    """One way of comparing conditions item by item.

    `column` is the rows' own, `reported` its name in the summary, `kept` what the share of the
    receiver that is kept is called, `shown_as` the figure of `standalone` that tables show of it. A
    difference is written in `unit` (`short_unit` in tables), times `scale`, with `places` decimals,
    in the style `style`. `risk` and `risk_style` say what a gate's risk is, `lost` what an item
    lost.
    """

    column: str
    reported: str
    kept: str
    shown_as: str
    unit: str
    short_unit: str
    style: str
    scale: int
    places: int
    risk: str
    risk_style: str
    lost: str

    @abstractmethod
    def advantage(self, table: Table, condition: str, other: str) -> tuple[Interval, int] | None:
        """How much better `condition` is than `other` and on how many items (positive is better);
        None without shared items."""

    @abstractmethod
    def scores(self, table: Table, condition: str, items: Sequence[str]) -> FloatArray:
        """Of each item what is the higher the better, `[items]`, comparable across conditions."""

    @abstractmethod
    def share_kept(self, table: Table, condition: str) -> Interval | NotShown | None:
        """The share of the receiver's own that `condition` keeps; None without shared items."""

    @abstractmethod
    def standalone(self, table: Table, condition: str, items: Sequence[str]) -> dict[str, Any]:
        """Figures against the receiver alone."""

    @abstractmethod
    def outcomes(self, g: FloatArray, s: FloatArray, clusters: Clusters) -> dict[str, Any]:
        """Answers gained and lost between scores g and s `[items]`, null where there are none."""

    @abstractmethod
    def harm(self, table: Table, condition: str) -> Interval | None:
        """Share of items that are lost which the sender had right; None where none can be."""

    @abstractmethod
    def losses(self, table: Table, condition: str, items: Sequence[str]) -> FloatArray:
        """Of each item what `condition` lost to native, `[items]`, in `unit`."""

    @abstractmethod
    def damage(
        self, table: Table, condition: str, among: Collection[str]
    ) -> tuple[list[str], FloatArray]:
        """Items `among` these that show what using `condition` did, and of each what a gate is to
        foresee, `[items]`."""


@dataclass(frozen=True)
class Loss(Metric):
    """Nats of the answer per character."""

    column: str = "loss"
    reported: str = "loss"
    kept: str = "recovery"
    shown_as: str = "floor_normalised"
    unit: str = "nats per character"
    short_unit: str = "nats/char"
    style: str = "loss"
    scale: int = 1
    places: int = 4
    risk: str = "KL to native, nats"
    risk_style: str = "small"
    lost: str = "{} nats per character"

    def advantage(self, table: Table, condition: str, other: str) -> tuple[Interval, int] | None:
        """Nats per character saved."""
        items = table.items([condition, other], self.column)
        if not items:
            return None
        saved = table.nats(other, condition, items) - table.column(condition, "loss", items)
        characters = table.column(condition, "characters", items)
        ratio = ratio_interval(saved, characters, table.documents(condition, items))
        return without_bounds(ratio), len(items)

    def scores(self, table: Table, condition: str, items: Sequence[str]) -> FloatArray:
        """Negated nats over the characters that native scored."""
        return -table.nats(condition, "native", items)

    def share_kept(self, table: Table, condition: str) -> Interval | NotShown | None:
        """Recovery."""
        return table.recovery(condition)

    def standalone(self, table: Table, condition: str, items: Sequence[str]) -> dict[str, Any]:
        """The ratio of losses, and recovery."""
        t, d = (table.nats(name, "native", items) for name in (condition, "native"))
        return {
            "loss_ratio": figure(retention(t, d, table.documents("native", items))),
            "floor_normalised": figure(table.recovery(condition)),
        }

    def outcomes(self, g: FloatArray, s: FloatArray, clusters: Clusters) -> dict[str, Any]:
        """Nothing: a loss is neither right nor wrong."""
        return {"identity": None, "mcnemar": None, "items_for_2_points": None}

    def harm(self, table: Table, condition: str) -> Interval | None:
        """Nothing."""
        return None

    def losses(self, table: Table, condition: str, items: Sequence[str]) -> FloatArray:
        """Nats per character of native's more than native's."""
        more = table.nats(condition, "native", items) - table.nats("native", "native", items)
        return more / table.column("native", "characters", items)

    def damage(
        self, table: Table, condition: str, among: Collection[str]
    ) -> tuple[list[str], FloatArray]:
        """KL(native ‖ condition) in nats."""
        items = [item for item in table.items([condition], "kl") if item in among]
        return items, table.column(condition, "kl", items)


@dataclass(frozen=True)
class RightAnswers(Metric):
    """Whether the answer was right."""

    column: str = "correct"
    reported: str = "accuracy"
    kept: str = "retention"
    shown_as: str = "retention"
    unit: str = "points"
    short_unit: str = "points"
    style: str = "points"
    scale: int = 100
    places: int = 1
    risk: str = "share of answers lost"
    risk_style: str = "percent"
    lost: str = "native right, translated wrong"

    def advantage(self, table: Table, condition: str, other: str) -> tuple[Interval, int] | None:
        """Share of items gained."""
        items = table.items([condition, other], self.column)
        if not items:
            return None
        first, second = (table.column(name, "correct", items) for name in (condition, other))
        return difference(first, second, table.documents(condition, items)), len(items)

    def scores(self, table: Table, condition: str, items: Sequence[str]) -> FloatArray:
        """1 where the answer was right, else 0."""
        return table.column(condition, "correct", items)

    def share_kept(self, table: Table, condition: str) -> Interval | NotShown | None:
        """Retention."""
        items = table.items([condition, "native"], self.column)
        if not items:
            return None
        t, d = (table.column(name, "correct", items) for name in (condition, "native"))
        return retention(t, d, table.documents("native", items))

    def standalone(self, table: Table, condition: str, items: Sequence[str]) -> dict[str, Any]:
        """Retention, and retention above guessing where every item says what guessing scores."""
        t, d = (table.column(name, "correct", items) for name in (condition, "native"))
        documents = table.documents("native", items)
        chances = [table.cells["native"][item].chance for item in items]
        known = [chance for chance in chances if chance is not None]
        above: Interval | NotShown = NotShown("no chance level is given for these items")
        if len(known) == len(items):
            above = floor_normalised(t, d, known, documents)
        return {
            "retention": figure(retention(t, d, documents)),
            "floor_normalised": figure(above),
        }

    def outcomes(self, g: FloatArray, s: FloatArray, clusters: Clusters) -> dict[str, Any]:
        """Gain and harm apart, McNemar's test, and the items needed for ±2 points."""
        parts, test = identity(g, s, clusters), mcnemar_exact(g, s)
        return {
            "identity": {
                "items": parts.items,
                "gained": parts.gained,
                "harmed": parts.harmed,
                "sender_wrong": parts.sender_wrong,
                "gain": figure(parts.gain),
                "harm": figure(parts.harm),
                "gain_given_sender_wrong": figure(parts.gain_given_wrong),
                "harm_given_sender_right": figure(parts.harm_given_right),
            },
            "mcnemar": {
                "only_condition": test.only_first,
                "only_sender": test.only_second,
                "p": number(test.p),
            },
            "items_for_2_points": items_for_half_width(parts.difference, parts.items),
        }

    def harm(self, table: Table, condition: str) -> Interval | None:
        """P(sender right, condition wrong)."""
        items = table.items([condition, "sender"], self.column)
        if not items:
            return None
        t, s = (table.column(name, "correct", items) for name in (condition, "sender"))
        return identity(t, s, table.documents("sender", items)).harm

    def losses(self, table: Table, condition: str, items: Sequence[str]) -> FloatArray:
        """1 where native is right and `condition` is not."""
        native = table.column("native", "correct", items)
        return native - table.column(condition, "correct", items)

    def damage(
        self, table: Table, condition: str, among: Collection[str]
    ) -> tuple[list[str], FloatArray]:
        """An answer lost: native right, condition wrong."""
        shared = table.items([condition, "native"], self.column)
        items = [item for item in shared if item in among]
        right = table.column(condition, "correct", items)
        return items, table.column("native", "correct", items) * (1 - right)


METRICS: dict[str, Metric] = {"loss": Loss(), "correct": RightAnswers()}
"""By the column of the rows, which is how a task names its metric."""


def metric_of(table: Table) -> Metric:
    """What the items of the table's task are compared by."""
    return METRICS[TASKS[table.task].metric]


def deciding_order() -> list[str]:
    """Tasks in the order in which they decide: those compared by loss first, for a loss tells
    conditions apart with fewer items than answers do."""
    return sorted(TASKS, key=lambda task: TASKS[task].metric != "loss")
