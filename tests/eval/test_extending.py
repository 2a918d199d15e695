"""What CONTRIBUTING says of a new task and a new condition, run as it stands there, from rows to
report."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvbridge.eval.conditions import CONDITIONS
from kvbridge.eval.conditions.names import controls, defaults
from kvbridge.eval.report.finish import finish
from kvbridge.eval.report.terminal import Terminal
from kvbridge.eval.run.evaluate import evaluate
from kvbridge.eval.screen.verdicts import screened_controls
from kvbridge.eval.tasks import TASKS
from kvbridge.eval.tasks.chosen import make_items
from kvbridge.eval.tasks.items import RawItem
from tests.eval.test_plans import setup
from tests.fitting.pairs import receiver, sender
from tests.models import random_texts

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text("utf-8")


def example(heading: str) -> None:
    """Runs the code under a heading, which registers what it defines."""
    code = re.search(rf"\n## {heading}\n.*?```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None, heading
    exec(compile(code[1], heading, "exec", dont_inherit=True), {"__name__": "contributing"})


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    tasks, conditions = dict(TASKS), dict(CONDITIONS)
    example("A new evaluation task")
    example("A new condition")
    yield
    for registry, before in ((TASKS, tasks), (CONDITIONS, conditions)):
        for name in registry.keys() - before.keys():
            del registry[name]


def raws() -> list[RawItem]:
    bodies: list[dict[str, Any]] = [
        {"task": "first_token", "context": text, "question": " and then", "answer": " the"}
        for text in random_texts(3, 700)
    ]
    return [RawItem(f"r{i}", f"d{i}", body) for i, body in enumerate(bodies)]


def test_both_go_from_rows_to_every_report(tmp_path: Path) -> None:
    items, excluded = make_items(raws(), sender(), receiver())
    assert not excluded
    evaluate(setup(), items, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["task"] for row in rows} == {"first_token"}
    assert {row["condition"] for row in rows} == set(defaults())
    assert {"wrong_tokens", "wrong_tokens_tail32"} <= {row["condition"] for row in rows}
    assert {row["status"] for row in rows} == {"ok"}, [row["reason"] for row in rows]
    summary = finish(tmp_path)
    assert summary["accuracy_task"] == "first_token"
    compared = {c["against"] for c in summary["contrasts"] if c["condition"] == "translated_tail32"}
    assert "wrong_tokens_tail32" in compared
    assert any("wrong_tokens" in reason for reason in summary["verdict_reasons"])
    console = Console(width=140, file=io.StringIO())
    console.print(Terminal(summary))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in (
        shown,
        (tmp_path / "summary.md").read_text(),
        (tmp_path / "report.html").read_text(),
    ):
        assert "Token-only, wrong document" in text
    for name in ("summary.md", "report.html"):
        assert "First token" in (tmp_path / name).read_text()


def test_a_control_is_asked_for_wherever_controls_are() -> None:
    assert controls()[-1] == "wrong_tokens"
    assert screened_controls()[-1] == "wrong_tokens"


def test_a_verdict_needs_a_new_control(rows_of: Any) -> None:
    """Rows of a run without it do not show that translated beats it."""
    from kvbridge.eval.report.summary import summarise

    summary = summarise(rows_of(recovered={"translated": 0.97}, correct={"translated": 0.84}))
    assert summary["verdict"] == "prefill"
    assert "the control wrong_tokens was not run" in summary["headline"]
    rows = rows_of(
        recovered={"translated": 0.97, "wrong_tokens": 0.3},
        correct={"translated": 0.84, "wrong_tokens": 0.1},
    )
    summary = summarise(rows)
    assert summary["verdict"] == "translate"
    assert "and the wrong document's token-only map" in summary["headline"]
