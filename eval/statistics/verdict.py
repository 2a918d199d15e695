"""Which of four things to do with a pair, by written rules.

1. `prefill`: translated does not beat each of its controls at the same tail (same receiver features,
   another document, nothing translated), or costs no less than a prefill, or the evidence for either is missing.
2. `cascade instead`: nothing is gained over leaving the conversation with the sender.
3. `translate behind the gate`: something is gained, but items that the sender had right are lost, a task
   gets worse than with the sender, or too little of the receiver is retained; or only the gated condition
   gains.
4. `translate`: none of that.

"Beats", "gains" and "worse" mean that the 95 % interval of the paired difference, clustered by document,
excludes 0. The three controls must all be beaten, so testing them each at 5 % needs no correction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbridge.eval.conditions.plans import CONTROLS, against, is_subject, ordered, paired
from kvbridge.eval.statistics import figures as statistics
from kvbridge.eval.statistics.bootstrap import Interval
from kvbridge.eval.statistics.figures import Refused
from kvbridge.eval.statistics.table import Table, bounds, number

TRANSLATE, GATE, CASCADE, PREFILL = (
    "translate",
    "translate behind the gate",
    "cascade instead",
    "prefill",
)
VERDICTS = (TRANSLATE, GATE, CASCADE, PREFILL)
ACCURACY_TASKS = ("recall", "multiple_choice", "qa")


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
    """One paired comparison; `difference` is positive where `condition` is better than `against`."""

    condition: str
    against: str
    task: str
    metric: str
    difference: Interval
    items: int
    documents: int

    def wins(self, rules: Rules) -> bool:
        return self.documents >= rules.documents_min and self.difference.above(0)

    def loses(self, rules: Rules) -> bool:
        return self.documents >= rules.documents_min and self.difference.below(0)

    def words(self) -> str:
        unit, scale, places = (
            ("nats per character", 1, 4) if self.metric == "loss" else ("points", 100, 1)
        )
        low, found, high = (
            f"{value * scale:+.{places}f}".replace("-", "\N{MINUS SIGN}")
            for value in (self.difference.low, self.difference.estimate, self.difference.high)
        )
        ci = f"[{low}, {high}]" if self.difference.known else "(no interval)"
        return f"{found} {ci} {unit} in {self.task}, n = {self.items}"

    def as_dict(self, rules: Rules) -> dict[str, Any]:
        return {
            "condition": self.condition,
            "against": self.against,
            "task": self.task,
            "metric": self.metric,
            "difference": number(self.difference.estimate),
            "difference_ci": bounds(self.difference),
            "p": number(self.difference.p),
            "n": self.items,
            "documents": self.documents,
            "beats": self.wins(rules),
        }


@dataclass(frozen=True)
class Verdict:
    """`name` is None where translated was not measured: then there is nothing to judge."""

    name: str | None
    reasons: tuple[str, ...]
    contrasts: tuple[Contrast, ...]
    not_run: tuple[tuple[str, str, str], ...] = ()


def metric_of(table: Table) -> str:
    return "correct" if table.task in ACCURACY_TASKS else "loss"


def contrast(table: Table, condition: str, other: str) -> Contrast | None:
    metric = metric_of(table)
    if (found := table.advantage(condition, other, metric)) is None:
        return None
    documents = len(set(table.documents(condition, table.items([condition, other], metric))))
    return Contrast(condition, other, table.task, metric, found[0], found[1], documents)


def subjects(table: Table) -> list[str]:
    """Conditions of `table` that are judged: translations at any tail, and gated."""
    return [name for name in ordered(table.cells) if is_subject(name)]


def all_contrasts(tables: Mapping[str, Table]) -> tuple[list[Contrast], list[tuple[str, str, str]]]:
    """Per task every translation and gated against its controls at the same tail, and each against the sender; and
    (task, condition, control) of comparisons whose control was not run."""
    found, not_run = [], []
    for task, table in tables.items():
        for condition in subjects(table):
            tails = table.tails(condition)
            for other in against(condition, *tails):
                if (made := contrast(table, condition, other)) is not None:
                    found.append(made)
                elif other in _needed(condition, tails):
                    not_run.append((task, condition, other))
        over_sender = (
            contrast(table, condition, "sender") for condition in (*subjects(table), "native")
        )
        found += [made for made in over_sender if made is not None]
    return found, not_run


def _needed(condition: str, tails: tuple[int, ...]) -> list[str]:
    """Comparisons without which a condition's figures say little."""
    gate = [paired("translated", tails)] if condition == "gated" else []
    return [*gate, *(paired(route, tails) for route in CONTROLS)]


def judge(tables: Mapping[str, Table], rules: Rules = DEFAULT_RULES) -> Verdict:
    """The verdict on `tables` (task → table) with its reasons in words, the deciding ones first."""
    made, not_run = all_contrasts(tables)
    contrasts = tuple(made)

    def verdict(name: str | None, *reasons: str) -> Verdict:
        return Verdict(name, reasons, contrasts, tuple(not_run))

    if deciding_task(tables) is None:
        reason = "translated was not measured on any item; eval run without --conditions measures all that a verdict needs"
        return verdict(None, reason)
    if beaten := _unbeaten(tables, contrasts, rules):
        return verdict(PREFILL, *beaten)
    share = _mean(tables, "translated", "prefill_share")
    if share is not None and share >= rules.prefill_share_max:
        return verdict(PREFILL, f"translated costs {share:.0%} of the receiver's own prefill")
    over_sender = [c for c in contrasts if c.condition == "translated" and c.against == "sender"]
    if not over_sender:
        return verdict(
            PREFILL, "the sender was not run on these items, so nothing shows that switching pays"
        )
    gains = [c for c in over_sender if c.wins(rules)]
    if not gains:
        gated = [
            c
            for c in contrasts
            if c.condition == "gated" and c.against == "sender" and c.wins(rules)
        ]
        accepted = _accepted(tables)
        none = [f"translated against the sender: {c.words()}" for c in over_sender]
        if gated and accepted >= rules.accepted_min:
            won = [f"gated against the sender: {c.words()}" for c in gated]
            return verdict(GATE, *won, *none, f"the gate accepts {accepted:.0%} of the caches")
        return verdict(CASCADE, *none)
    won = [f"gains over the sender: {c.words()}" for c in gains]
    doubts = [f"worse than the sender: {c.words()}" for c in over_sender if c.loses(rules)]
    for table in tables.values():
        doubts += _harm(table, rules) + _retention(table, rules)
    return verdict(GATE, *doubts, *won) if doubts else verdict(TRANSLATE, *won)


def _unbeaten(
    tables: Mapping[str, Table], contrasts: tuple[Contrast, ...], rules: Rules
) -> list[str]:
    """Why translated cannot be said to beat its controls; decided on continuation where there is one."""
    task, reasons = deciding_task(tables), []
    for control in CONTROLS:
        found = [
            c
            for c in contrasts
            if (c.condition, c.against, c.task) == ("translated", control, task)
        ]
        if not found:
            reasons.append(
                f"the control {control} was not run in {task}, so translated is not shown to beat it"
            )
        elif found[0].documents < rules.documents_min:
            reasons.append(
                f"against {control} only {found[0].documents} documents, {rules.documents_min} are needed"
            )
        elif not found[0].wins(rules):
            reasons.append(f"translated does not significantly beat {control}: {found[0].words()}")
    return reasons


def deciding_task(tables: Mapping[str, Table]) -> str | None:
    for task in ("continuation", *ACCURACY_TASKS):
        if task in tables and tables[task].items(["translated"], metric_of(tables[task])):
            return task
    return None


def _harm(table: Table, rules: Rules) -> list[str]:
    if metric_of(table) != "correct" or not (
        items := table.items(["translated", "sender"], "correct")
    ):
        return []
    pair = [table.column(name, "correct", items) for name in ("translated", "sender")]
    harm = statistics.identity(pair[0], pair[1], table.documents("sender", items)).harm
    if harm.estimate <= rules.harm_max:
        return []
    ci = f" [{harm.low:.1%}, {harm.high:.1%}]" if harm.known else ""
    return [
        f"{harm.estimate:.1%}{ci} of the items in {table.task} are lost that the sender had right"
    ]


def _retention(table: Table, rules: Rules) -> list[str]:
    if metric_of(table) == "loss":
        kept, name = table.recovery("translated"), "recovery"
    elif items := table.items(["translated", "native"], "correct"):
        pair = [table.column(condition, "correct", items) for condition in ("translated", "native")]
        kept, name = (
            statistics.retention(pair[0], pair[1], table.documents("native", items)),
            "retention",
        )
    else:
        return []
    if isinstance(kept, Refused):
        return [f"{name} in {table.task} is not shown: {kept.because}"]
    return (
        [f"{name} in {table.task} is {kept.estimate:.0%}, below {rules.retention_min:.0%}"]
        if kept and kept.estimate < rules.retention_min
        else []
    )


def _mean(tables: Mapping[str, Table], condition: str, field: str) -> float | None:
    values = [
        v
        for table in tables.values()
        for v in table.column(condition, field, table.items([condition], field))
    ]
    return float(sum(values) / len(values)) if values else None


def _accepted(tables: Mapping[str, Table]) -> float:
    gated = [
        row
        for table in tables.values()
        for row in table.cells.get("gated", {}).values()
        if row.verdict
    ]
    return sum(row.verdict != "discard" for row in gated) / len(gated) if gated else 0.0


def headline(verdict: Verdict, tables: Mapping[str, Table]) -> str:
    """The report's first line. It says first of all when translated is not shown to beat its controls."""
    if verdict.name is None:
        return f"Not judged: {verdict.reasons[0]}."
    if verdict.name == PREFILL:
        return f"Prefill: {verdict.reasons[0]}."
    task = deciding_task(tables)
    table = tables[task] if task else None
    kept = table.recovery("translated") if table and task == "continuation" else None
    share = _mean(tables, "translated", "prefill_share")
    cost = f" at {share:.0%} of a prefill's FLOPs" if share is not None else ""
    scored = "beats token-only, the wrong document and the tail alone"
    if isinstance(kept, Interval):
        ci = f" [{kept.low:.0%}, {kept.high:.0%}]" if kept.known else ""
        scored = f"recovers {kept.estimate:.0%}{ci} of what the context is worth{cost} and {scored}"
    return f"{verdict.name.capitalize()}: translated {scored}; {verdict.reasons[0]}."
