"""From rows to `summary.json`: every figure recomputed, the same bytes for the same rows in any
order.

What rows cannot hold (who the pair is, how long a fit took, R² per layer pair) comes from the run's
`run.json` as `meta`; of it only `pair` and `timings` enter the summary.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbridge.errors import EvalError
from kvbridge.eval.conditions import CONDITIONS
from kvbridge.eval.conditions.names import ordered
from kvbridge.eval.run.rows import Row
from kvbridge.eval.statistics.bootstrap import Interval, NotShown
from kvbridge.eval.statistics.contrasts import DEFAULT_RULES, Rules, subjects
from kvbridge.eval.statistics.denominators import cascading, standalone
from kvbridge.eval.statistics.gated import gate
from kvbridge.eval.statistics.means import mean, proportion
from kvbridge.eval.statistics.metrics import deciding_order
from kvbridge.eval.statistics.table import Table, bounds, check_rows, median, number
from kvbridge.eval.statistics.verdict import headline, judge
from kvbridge.eval.tasks import TASKS
from kvbridge.format import SUMMARY_SCHEMA

SUMMARY_METRICS = (
    "loss",
    "loss_per_token",
    "recovery",
    "kl",
    "agreement",
    "accuracy",
    "f1",
    "prefill_share",
    "ttft_ms",
)


def summarise(
    rows: Iterable[Row], meta: Mapping[str, Any] | None = None, *, rules: Rules = DEFAULT_RULES
) -> dict[str, Any]:
    """The content of `summary.json`. Raises EvalError for rows that are not one table of `meta`'s
    pair."""
    rows, meta = list(rows), meta or {}
    check_rows(rows)
    pair = dict(meta.get("pair") or {})
    if pair.setdefault("digest", rows[0].pair) != rows[0].pair:
        raise EvalError(f"expected rows of pair {pair['digest']}, found {rows[0].pair}")
    tables = {task: Table.of(task, rows) for task in TASKS if any(row.task == task for row in rows)}
    verdict = judge(tables, rules)
    names = ordered({row.condition for row in rows})
    answered = [task for task in tables if TASKS[task].metric == "correct"]
    accuracy_task = answered[0] if answered else None
    loss_task = next((task for task in deciding_order() if task in tables), None)
    decided = {task: gate(table) for task, table in tables.items()}
    by_task = {
        task: {name: condition(table, name) for name in names} for task, table in tables.items()
    }
    return {
        "schema": SUMMARY_SCHEMA,
        "pair": pair,
        "n": (measured := len({(row.task, row.item) for row in rows if row.status == "ok"})),
        "n_left_out": len({(row.task, row.item) for row in rows}) - measured,
        "documents": len({row.document for row in rows if row.status == "ok"}),
        "headline": headline(verdict, tables),
        "verdict": verdict.name,
        "verdict_reasons": list(verdict.reasons),
        "verdict_rules": {name: getattr(rules, name) for name in sorted(vars(rules))},
        "loss_task": loss_task,
        "accuracy_task": accuracy_task,
        "conditions": {
            name: _headline_condition(by_task, name, loss_task, accuracy_task) for name in names
        },
        "tasks": {
            task: {
                "n": len({i for cell in table.cells.values() for i in cell}),
                "conditions": by_task[task],
            }
            for task, table in tables.items()
        },
        "contrasts": [c.as_dict(rules) for c in verdict.contrasts],
        "contrasts_not_run": [
            {"task": task, "condition": name, "against": other}
            for task, name, other in verdict.not_run
        ],
        "denominators": {
            "standalone": {task: _each(table, standalone) for task, table in tables.items()},
            "cascading": {task: _each(table, cascading) for task, table in tables.items()},
        },
        "gate": {task: said for task, said in decided.items() if said} or None,
        "counts": counts(rows),
        "timings": dict(meta.get("timings") or {}),
    }


def dumps(summary: Mapping[str, Any]) -> str:
    """The exact text of `summary.json`."""
    return json.dumps(summary, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def write_summary(path: Path | str, summary: Mapping[str, Any]) -> None:
    """Write `summary.json` under a temporary name and rename it."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(dumps(summary), encoding="utf-8")
    temporary.replace(path)


def condition(table: Table, name: str) -> dict[str, Any]:
    """Every metric of one condition on one task, each with `<metric>_ci`; null where it does not
    apply."""
    own_tokens = name not in CONDITIONS or CONDITIONS[name].own_tokens
    timed = table.items([name], "ttft_ms")
    agreement = table.weighted(name, "agreement", "tokens")
    shown: dict[str, Interval | NotShown | None] = {
        "loss": table.per(name, "characters"),
        "loss_per_token": table.per(name, "tokens") if own_tokens else None,
        "recovery": table.recovery(name),
        "kl": table.weighted(name, "kl", "tokens"),
        "agreement": agreement.clipped(0.0, 1.0) if agreement is not None else None,
        "accuracy": _average(table, name, "correct", share=True),
        "f1": _average(table, name, "f1", share=True),
        "prefill_share": _average(table, name, "prefill_share", share=False),
        "ttft_ms": median(table.column(name, "ttft_ms", timed)) if timed else None,
    }
    result: dict[str, Any] = {"n": len(table.cells.get(name, {}))}
    for metric in SUMMARY_METRICS:
        value = shown[metric]
        result[metric] = number(value.estimate) if isinstance(value, Interval) else None
        result[f"{metric}_ci"] = bounds(value)
    return result


def _average(table: Table, name: str, field: str, *, share: bool) -> Interval | None:
    items = table.items([name], field)
    if not items:
        return None
    average = proportion if share else mean
    return average(table.column(name, field, items), table.documents(name, items))


def _headline_condition(
    by_task: Mapping[str, Any], name: str, loss_task: str | None, accuracy_task: str | None
) -> dict[str, Any]:
    """Accuracy and F1 from the accuracy task, the rest from the loss task; `n` counts rows of all
    tasks."""
    result = dict(by_task[loss_task][name]) if loss_task else {}
    if accuracy_task:
        answers = by_task[accuracy_task][name]
        result |= {key: answers[key] for key in ("accuracy", "accuracy_ci", "f1", "f1_ci")}
    result["n"] = sum(table[name]["n"] for table in by_task.values())
    return result


def _each(table: Table, figures: Any) -> dict[str, Any]:
    each = {name: figures(table, name) for name in subjects(table)}
    return {name: value for name, value in each.items() if value is not None}


def counts(rows: Sequence[Row]) -> dict[str, Any]:
    """How many rows were used, and what became of the others: nothing is dropped unseen."""
    statuses = Counter(row.status for row in rows)
    missing: dict[str, int] = {}
    for task in TASKS:
        items = {row.item for row in rows if row.task == task}
        present = Counter(row.condition for row in rows if row.task == task)
        missing |= {
            f"{task}/{name}": len(items) - n
            for name, n in sorted(present.items())
            if n < len(items)
        }
    bad = [row for row in rows if row.status != "ok"]
    return {
        "rows": len(rows),
        "ok": statuses["ok"],
        "failed": statuses["failed"],
        "excluded": statuses["excluded"],
        "missing": sum(missing.values()),
        "missing_by_condition": missing,
        "not_ok_by_condition": dict(
            sorted(Counter(f"{row.task}/{row.condition}" for row in bad).items())
        ),
        "reasons": dict(
            sorted(
                Counter(f"{row.status}: {row.reason or 'no reason given'}" for row in bad).items()
            )
        ),
    }
