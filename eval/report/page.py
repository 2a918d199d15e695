"""The report: one HTML file without scripts or network, and the same in Markdown.

Everything shown is in the summary or in the rows; `meta` (a run's `run.json`) adds what neither can
hold: `r2` [receiver layers, sender layers], `attention_cosine` [receiver layers], `predictors`
(name → value), `command`, `versions`, `dates`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from kvbridge.eval.conditions.names import label, ordered
from kvbridge.eval.report import charts, display
from kvbridge.eval.report.gate_words import gate_cost, rungs
from kvbridge.eval.report.markdown import markdown
from kvbridge.eval.run.rows import Row
from kvbridge.eval.statistics.gated import gate_arrays
from kvbridge.eval.statistics.metrics import metric_of
from kvbridge.eval.statistics.routing import risk_coverage
from kvbridge.eval.statistics.table import Table
from kvbridge.eval.statistics.verdict import CASCADE, GATE, PREFILL, TRANSLATE
from kvbridge.eval.tasks import TASKS, label_of
from kvbridge.format import RUN_MARKDOWN, RUN_REPORT

WORST = 8
TEXT_CHARACTERS = 1500
_BADGES = {
    TRANSLATE: ("yes", "✓"),
    GATE: ("gate", "◐"),
    CASCADE: ("cascade", "↩"),
    PREFILL: ("no", "✕"),
}


@dataclass(frozen=True)
class WorstItem:
    """An item on which the translation lost most; `lost` in words, `text` cut to a readable
    length."""

    item: str
    document: str
    task: str
    lost: str
    text: str | None


def worst_items(
    rows: Iterable[Row], texts: Mapping[str, str] | None = None, limit: int = WORST
) -> list[WorstItem]:
    """The `limit` worst items of each task, by nats per character lost to native or by answers lost
    to it."""
    rows, worst = list(rows), []
    for task in TASKS:
        table = Table.of(task, rows)
        metric = metric_of(table)
        items = table.items(["translated", "native"], metric.column)
        if not items:
            continue
        lost = dict(zip(items, metric.losses(table, "translated", items), strict=True))
        losing = sorted((item for item in items if lost[item] > 0), key=lambda i: (-lost[i], i))
        for item in losing[:limit]:
            words = metric.lost.format(display.number(float(lost[item]), "loss", signed=True))
            text = (texts or {}).get(item)
            if text is not None and len(text) > TEXT_CHARACTERS:
                text = text[:TEXT_CHARACTERS] + " …"
            document = table.cells["native"][item].document
            worst.append(WorstItem(item, document, task, words, text))
    return worst


def gate_lines(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Risk over coverage for each task with scored gated rows: the line, its axis and what the risk
    is."""
    rows, lines = list(rows), {}
    for task in TASKS:
        table = Table.of(task, rows)
        arrays = gate_arrays(table)
        if arrays is None:
            continue
        curve, best = risk_coverage(arrays[0], arrays[1]), risk_coverage(arrays[0], arrays[0])
        top = max(float(curve.risk.max()), 1e-9)
        metric = metric_of(table)
        lines[task] = {
            "line": charts.line([0.0, *curve.coverage], [None, *curve.risk], 0.0, top),
            "best": charts.line([0.0, *best.coverage], [None, *best.risk], 0.0, top),
            "top": display.number(top, metric.risk_style),
            "half": display.number(top / 2, metric.risk_style),
            "risk": metric.risk,
            "all": display.number(float(curve.risk[-1]), metric.risk_style),
        }
    return lines


def render_html(
    summary: Mapping[str, Any],
    rows: Sequence[Row] = (),
    meta: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
) -> str:
    """The report as HTML; `texts` maps item ids to what is shown of them. Every text is escaped."""
    meta = meta or {}
    sender, receiver = display.pair_name(summary)
    return (
        environment()
        .get_template("report.html.jinja")
        .render(
            s=summary,
            said=_sentence(summary["headline"]),
            contrasts=_contrasts(summary),
            not_run={
                (c["condition"], c["against"], c["task"]) for c in summary["contrasts_not_run"]
            },
            sender=sender,
            receiver=receiver,
            badge=_BADGES.get(summary["verdict"], ("no", "")),
            verdict=summary["verdict"] or "not judged",
            measured=display.measured(summary),
            task_label=label_of,
            role=display.role,
            predictor=display.predictor,
            rungs=rungs,
            gate_cost=gate_cost,
            metrics=display.columns(summary),
            names=ordered(summary["conditions"]),
            ordered=ordered,
            bars=charts.recovery_bars(summary),
            heat=charts.heat_map(meta.get("r2")),
            viridis=charts.VIRIDIS,
            cosine=charts.layer_line(meta.get("attention_cosine")),
            layers=len(meta.get("attention_cosine") or []),
            gates=gate_lines(rows),
            worst=worst_items(rows, texts),
            command=meta.get("command"),
            predictors={
                name: meta["predictors"][name] for name in sorted(meta.get("predictors") or {})
            },
            versions=dict(meta.get("versions") or {}),
            timings=dict(summary["timings"]),
        )
    )


def environment() -> jinja2.Environment:
    """Templates of reports: every text escaped, an unknown name is an error."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "label": label,
        "number": display.number,
        "interval": display.interval,
    }
    return templates


def _sentence(headline: str) -> str:
    """The headline without the verdict, which the report shows above it."""
    said = headline.partition(": ")[2] or headline
    return said[:1].upper() + said[1:]


def _contrasts(summary: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Comparisons with controls as condition → control → task."""
    made: dict[str, dict[str, dict[str, Any]]] = {}
    for c in summary["contrasts"]:
        if c["against"] != "sender":
            made.setdefault(c["condition"], {}).setdefault(c["against"], {})[c["task"]] = c
    for c in summary["contrasts_not_run"]:
        made.setdefault(c["condition"], {}).setdefault(c["against"], {})
    return made


def write_report(
    folder: Path | str,
    summary: Mapping[str, Any],
    rows: Sequence[Row] = (),
    meta: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
) -> tuple[Path, Path]:
    """Write `report.html` and `summary.md` into `folder`, each under a temporary name first;
    returns both paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        RUN_REPORT: render_html(summary, rows, meta, texts),
        RUN_MARKDOWN: markdown(summary, (meta or {}).get("command")),
    }
    for name, text in content.items():
        temporary = folder / f".{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, folder / name)
    return folder / RUN_REPORT, folder / RUN_MARKDOWN
