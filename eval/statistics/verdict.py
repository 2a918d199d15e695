"""Which of four things to do with a pair, by written rules.

1. `prefill`: translated does not beat each of its controls at the same tail (same receiver
features, another document, nothing translated), or costs no less than a prefill, or the evidence
for either is missing.
2. `cascade instead`: nothing is gained over leaving the conversation with the sender.
3. `translate behind the gate`: something is gained, but items that the sender had right are lost, a
task gets worse than with the sender, or too little of the receiver is retained; or only the gated
condition gains.
4. `translate`: none of that.

"Beats", "gains" and "worse" mean that the 95 % interval of the paired difference, clustered by
document, excludes 0. The three controls must all be beaten, so testing them each at 5 % needs no
correction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbridge.eval.conditions.names import controls, phrase
from kvbridge.eval.statistics.bootstrap import Interval, NotShown
from kvbridge.eval.statistics.contrasts import DEFAULT_RULES, Contrast, Rules, all_contrasts
from kvbridge.eval.statistics.metrics import deciding_order, metric_of
from kvbridge.eval.statistics.table import Table

TRANSLATE, GATE, CASCADE, PREFILL = (
    "translate",
    "translate behind the gate",
    "cascade instead",
    "prefill",
)
PAIR_VERDICTS = (TRANSLATE, GATE, CASCADE, PREFILL)


@dataclass(frozen=True)
class PairVerdict:
    """`name` is None where translated was not measured: then there is nothing to judge."""

    name: str | None
    reasons: tuple[str, ...]
    contrasts: tuple[Contrast, ...]
    not_run: tuple[tuple[str, str, str], ...] = ()


def judge(tables: Mapping[str, Table], rules: Rules = DEFAULT_RULES) -> PairVerdict:
    """The verdict on `tables` (task → table) with its reasons in words, the deciding ones first."""
    contrasts, not_run = all_contrasts(tables)
    name, reasons = _judged(tables, contrasts, rules)
    return PairVerdict(name, tuple(reasons), tuple(contrasts), tuple(not_run))


def _judged(
    tables: Mapping[str, Table], contrasts: list[Contrast], rules: Rules
) -> tuple[str | None, list[str]]:
    """The verdict's name and reasons, by the rules in their order."""
    if deciding_task(tables) is None:
        return None, [
            "translated was not measured on any item; eval run without --conditions measures all "
            "that a verdict needs"
        ]
    if unbeaten := _unbeaten(tables, contrasts, rules):
        return PREFILL, unbeaten
    share = _mean(tables, "translated", "prefill_share")
    if share is not None and share >= rules.prefill_share_max:
        return PREFILL, [f"translated costs {share:.0%} of the receiver's own prefill"]
    over_sender = _over_sender(contrasts, "translated")
    if not over_sender:
        return PREFILL, [
            "the sender was not run on these items, so nothing shows that switching pays"
        ]
    gains = [c for c in over_sender if c.wins(rules)]
    if not gains:
        return _without_gain(tables, contrasts, over_sender, rules)
    won = [f"gains over the sender: {c.words()}" for c in gains]
    doubts = [f"worse than the sender: {c.words()}" for c in over_sender if c.loses(rules)]
    for table in tables.values():
        doubts += _harm(table, rules) + _retention(table, rules)
    return (GATE, [*doubts, *won]) if doubts else (TRANSLATE, won)


def _without_gain(
    tables: Mapping[str, Table],
    contrasts: list[Contrast],
    over_sender: list[Contrast],
    rules: Rules,
) -> tuple[str, list[str]]:
    """Where translated gains nothing over the sender: the gate where gated does, else cascading."""
    none = [f"translated against the sender: {c.words()}" for c in over_sender]
    gated = [c for c in _over_sender(contrasts, "gated") if c.wins(rules)]
    accepted = _accepted(tables)
    if not gated or accepted < rules.accepted_min:
        return CASCADE, none
    won = [f"gated against the sender: {c.words()}" for c in gated]
    return GATE, [*won, *none, f"the gate accepts {accepted:.0%} of the caches"]


def _over_sender(contrasts: list[Contrast], condition: str) -> list[Contrast]:
    return [c for c in contrasts if c.condition == condition and c.against == "sender"]


def _unbeaten(tables: Mapping[str, Table], contrasts: list[Contrast], rules: Rules) -> list[str]:
    """Why translated cannot be said to beat its controls; decided on the deciding task."""
    task = deciding_task(tables)
    made = {(c.condition, c.against, c.task): c for c in contrasts}
    reasons = []
    for control in controls():
        one = made.get(("translated", control, task or ""))
        if one is None:
            reasons.append(
                f"the control {control} was not run in {task}, so translated is not shown to beat "
                "it"
            )
        elif one.documents < rules.documents_min:
            reasons.append(
                f"against {control} only {one.documents} documents, {rules.documents_min} are "
                "needed"
            )
        elif not one.wins(rules):
            reasons.append(f"translated does not significantly beat {control}: {one.words()}")
    return reasons


def deciding_task(tables: Mapping[str, Table]) -> str | None:
    """The first task, in the order of deciding, on which translated was measured."""
    for task in deciding_order():
        if task in tables and tables[task].items(["translated"], metric_of(tables[task]).column):
            return task
    return None


def _harm(table: Table, rules: Rules) -> list[str]:
    harm = metric_of(table).harm(table, "translated")
    if harm is None or harm.estimate <= rules.harm_max:
        return []
    ci = f" [{harm.low:.1%}, {harm.high:.1%}]" if harm.known else ""
    return [
        f"{harm.estimate:.1%}{ci} of the items in {table.task} are lost that the sender had right"
    ]


def _retention(table: Table, rules: Rules) -> list[str]:
    metric = metric_of(table)
    share = metric.share_kept(table, "translated")
    if isinstance(share, NotShown):
        return [f"{metric.kept} in {table.task} is not shown: {share.because}"]
    if share is None or share.estimate >= rules.retention_min:
        return []
    least = f"below {rules.retention_min:.0%}"
    return [f"{metric.kept} in {table.task} is {share.estimate:.0%}, {least}"]


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


def headline(verdict: PairVerdict, tables: Mapping[str, Table]) -> str:
    """The report's first line. It says first of all when translated is not shown to beat its
    controls."""
    if verdict.name is None:
        return f"Not judged: {verdict.reasons[0]}."
    if verdict.name == PREFILL:
        return f"Prefill: {verdict.reasons[0]}."
    return f"{verdict.name.capitalize()}: translated {_scored(tables)}; {verdict.reasons[0]}."


def _scored(tables: Mapping[str, Table]) -> str:
    """What translated recovers and costs, where the deciding task says it, and what it beats."""
    *first, last = (phrase(control) for control in controls())
    beats = f"beats {', '.join(first)} and {last}"
    task = deciding_task(tables)
    if task is None or metric_of(tables[task]).column != "loss":
        return beats
    share = tables[task].recovery("translated")
    if not isinstance(share, Interval):
        return beats
    ci = f" [{share.low:.0%}, {share.high:.0%}]" if share.known else ""
    spent = _mean(tables, "translated", "prefill_share")
    cost = f" at {spent:.0%} of a prefill's FLOPs" if spent is not None else ""
    return f"recovers {share.estimate:.0%}{ci} of what the context is worth{cost} and {beats}"
