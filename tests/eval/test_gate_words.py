"""What a report, its Markdown and the terminal say of a gate."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from kvbridge.eval.report.markdown import markdown
from kvbridge.eval.report.page import render_html
from kvbridge.eval.report.summary import summarise
from kvbridge.eval.report.terminal import Terminal
from kvbridge.eval.run.rows import Row
from tests.eval.test_report import META

MakeRows = Callable[..., list[Row]]


def test_a_gate_without_scores_shows_what_it_decided_and_why(rows_of: MakeRows) -> None:
    refused: dict[str, Any] = {"score": None, "verdict": "discard", "reason": "uncalibrated"}
    rows = [
        replace(r, **refused) if r.condition == "gated" else r
        for r in rows_of(gated=True, tasks=("recall",))
    ]
    summary = summarise(rows, META)
    count = summary["gate"]["recall"]["n"]
    assert summary["gate"]["recall"]["reasons"] == {"uncalibrated": count}
    page = render_html(summary, rows, META)
    assert f"<span>discard: {count}</span><span>uncalibrated: {count}</span>" in page
    assert f"{count} discard ({count} uncalibrated)" in markdown(summary)
    console = Console(record=True, width=120)
    console.print(Terminal(summary))
    assert f"{count} discard ({count} uncalibrated)" in console.export_text()


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (
            1.37,
            "137.0% of a prefill's FLOPs on average, native 100%: the gate costs more than it saves here",
        ),
        (
            0.4,
            "40.0% of a prefill's FLOPs on average, native 100%: the gate saves 60.0% of a prefill",
        ),
        (None, None),
    ],
)
def test_what_a_gate_saves_or_costs_is_said_everywhere(
    rows_of: MakeRows, share: float | None, said: str | None
) -> None:
    decided: dict[str, Any] = {
        "verdict": "use_approximate",
        "reason": "gate_lenient",
        "prefill_share": share,
    }
    rows = [
        replace(r, **decided) if r.condition == "gated" else r
        for r in rows_of(gated=True, tasks=("recall",))
    ]
    summary = summarise(rows, META)
    console = Console(record=True, width=200)
    console.print(Terminal(summary))
    texts = (
        console.export_text(),
        markdown(summary),
        html.unescape(render_html(summary, rows, META)),
    )
    for text in texts:
        assert "use_approximate" in text.replace("\\", "")
        assert "gate_lenient" in text.replace("\\", "")
        if said:
            assert said in text
        else:
            assert "behind the gate a request takes" not in text
