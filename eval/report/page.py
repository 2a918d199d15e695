"""The report: one HTML file without scripts or network, and the same in Markdown.

Everything shown is in the summary or in the rows; `meta` (a run's `run.json`) adds what neither can hold: `r2` [receiver
layers, sender layers], `attention_cosine` [receiver layers], `predictors` (name → value), `command`, `versions`, `dates`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from kvbridge.eval.conditions.plans import ordered
from kvbridge.eval.report import charts, display
from kvbridge.eval.run.rows import Row
from kvbridge.eval.statistics.gated import gate_arrays
from kvbridge.eval.statistics.routing import risk_coverage
from kvbridge.eval.statistics.table import Table
from kvbridge.eval.statistics.verdict import CASCADE, GATE, TRANSLATE, metric_of
from kvbridge.format import RUN_MARKDOWN, RUN_REPORT

WORST = 8
TEXT_CHARACTERS = 1500
_BADGES = {
    TRANSLATE: ("yes", "✓"),
    GATE: ("gate", "◐"),
    CASCADE: ("cascade", "↩"),
    "prefill": ("no", "✕"),
}


@dataclass(frozen=True)
class WorstItem:
    """An item on which the translation lost most; `lost` in words, `text` cut to a readable length."""

    item: str
    document: str
    task: str
    lost: str
    text: str | None


def worst_items(
    rows: Iterable[Row], texts: Mapping[str, str] | None = None, limit: int = WORST
) -> list[WorstItem]:
    """The `limit` worst items of each task, by nats per character lost to native or by answers lost to it."""
    rows, found = list(rows), []
    for task in ("continuation", "recall", "multiple_choice", "qa"):
        table = Table.of(task, rows)
        metric = metric_of(table)
        items = table.items(["translated", "native"], metric)
        if not items:
            continue
        if metric == "loss":
            lost = (
                table.nats("translated", "native", items) - table.nats("native", "native", items)
            ) / table.column("native", "characters", items)
            words = [
                f"{display.number(float(x), 'loss', signed=True)} nats per character" for x in lost
            ]
        else:
            lost = table.column("native", "correct", items) - table.column(
                "translated", "correct", items
            )
            words = ["native right, translated wrong"] * len(items)
        order = sorted(range(len(items)), key=lambda i: (-lost[i], items[i]))
        for index in [i for i in order if lost[i] > 0][:limit]:
            item, text = items[index], (texts or {}).get(items[index])
            if text is not None and len(text) > TEXT_CHARACTERS:
                text = text[:TEXT_CHARACTERS] + " …"
            found.append(
                WorstItem(item, table.cells["native"][item].document, task, words[index], text)
            )
    return found


def gate_lines(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Risk over coverage for each task with scored gated rows: the line, its axis and what the risk is."""
    rows, found = list(rows), {}
    for task in ("continuation", "recall", "multiple_choice", "qa"):
        if (arrays := gate_arrays(table := Table.of(task, rows))) is None:
            continue
        curve, best = risk_coverage(arrays[0], arrays[1]), risk_coverage(arrays[0], arrays[0])
        top = max(float(curve.risk.max()), 1e-9)
        answers = metric_of(table) == "correct"
        found[task] = {
            "line": charts.line([0.0, *curve.coverage], [None, *curve.risk], 0.0, top),
            "best": charts.line([0.0, *best.coverage], [None, *best.risk], 0.0, top),
            "top": display.number(top, "percent" if answers else "small"),
            "half": display.number(top / 2, "percent" if answers else "small"),
            "risk": "share of answers lost" if answers else "KL to native, nats",
            "all": display.number(float(curve.risk[-1]), "percent" if answers else "small"),
        }
    return found


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
            tasks=display.TASKS,
            role=display.role,
            predictor=display.predictor,
            rungs=display.rungs,
            gate_cost=display.gate_cost,
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
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "label": display.label,
        "number": display.number,
        "interval": display.interval,
    }
    return found


def _sentence(headline: str) -> str:
    """The headline without the verdict, which the report shows above it."""
    said = headline.partition(": ")[2] or headline
    return said[:1].upper() + said[1:]


def _contrasts(summary: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Comparisons with controls as condition → control → task."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for c in summary["contrasts"]:
        if c["against"] != "sender":
            found.setdefault(c["condition"], {}).setdefault(c["against"], {})[c["task"]] = c
    for c in summary["contrasts_not_run"]:
        found.setdefault(c["condition"], {}).setdefault(c["against"], {})
    return found


def write_report(
    folder: Path | str,
    summary: Mapping[str, Any],
    rows: Sequence[Row] = (),
    meta: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
) -> tuple[Path, Path]:
    """Write `report.html` and `summary.md` into `folder`, each under a temporary name first; returns both paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        RUN_REPORT: render_html(summary, rows, meta, texts),
        RUN_MARKDOWN: display.markdown(summary, (meta or {}).get("command")),
    }
    for name, text in content.items():
        temporary = folder / f".{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, folder / name)
    return folder / RUN_REPORT, folder / RUN_MARKDOWN
