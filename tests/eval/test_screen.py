"""Screenings of tiny models: predictors, refused pairs, rows of every kind as data, cut runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvbridge
from kvbridge.errors import CorruptFile, EvalError, UsageError
from kvbridge.eval.screen import fleet as screening
from kvbridge.eval.screen.data import FleetData, screen_data
from kvbridge.eval.screen.fleet import ScreenConfig, screen
from kvbridge.eval.screen.predictors import PREDICTORS, predictors
from kvbridge.eval.tasks import TASKS, kind_of
from kvbridge.eval.tasks.continuation import Continuation
from kvbridge.eval.tasks.items import RawItem
from kvbridge.fitting.data import Document
from kvbridge.fitting.splits import split_of
from tests.fitting.pairs import documents, receiver, sender
from tests.models import random_texts

FRACTIONS = (0.8, 0.1, 0.1)


@pytest.fixture
def short_windows() -> Iterator[None]:
    """Continuation items that texts of a few hundred characters give."""
    before = TASKS["continuation"]
    TASKS["continuation"] = Continuation(context=24, continuation=6)
    yield
    TASKS["continuation"] = before


def raws() -> list[RawItem]:
    return [
        RawItem(f"t{i}", f"d{i}", {"text": text}) for i, text in enumerate(random_texts(3, 900))
    ]


def options(
    say: Callable[[str], None] = lambda line: None, predict_only: bool = False
) -> dict[str, Any]:
    fit = kvbridge.FitConfig(layers=1, batch_tokens=512, cosine_documents=1)
    config = ScreenConfig(fit=fit, items=3, command="x", predict_only=predict_only, latency=False)
    return {"config": config, "say": say}


def test_predictors_tell_the_same_model_from_another() -> None:
    found = predictors(sender(), receiver(), documents()[:8])
    assert set(found) == set(PREDICTORS)
    assert found["end_match"] == 1
    own = predictors(receiver(), receiver(), documents()[:8])
    assert own["cka"] == pytest.approx(1)
    assert own["cca"] == pytest.approx(1)
    assert 0 < found["cca"] < 1
    assert own["loss_gap"] == 0
    assert own["r2_gain"] > found["r2_gain"]


@pytest.mark.usefixtures("short_windows")
def test_a_screening_covers_all_ordered_pairs_and_continues(tmp_path: Path) -> None:
    result = screen([sender(), receiver()], FleetData(documents(), raws()), tmp_path, **options())
    assert {(r["sender"], r["receiver"]) for r in result["pairs"]} == {
        (sender().name, receiver().name),
        (receiver().name, sender().name),
    }
    assert "2 × 1 = 2" in result["fleet"]["words"]
    assert "refused" in result["correlation_with_recovery"]
    assert all("cca" in r["predictors"] for r in result["pairs"])
    reports = list(tmp_path.glob("*/report.html"))
    assert all("CCA of the same layers" in path.read_text("utf-8") for path in reports)
    files = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("weights.safetensors")}
    assert len(files) == len(reports) == 2
    assert "2 ordered pairs" in (tmp_path / "report.html").read_text("utf-8")
    assert (tmp_path / "summary.md").exists()
    again = screen([sender(), receiver()], FleetData(documents(), raws()), tmp_path, **options())
    assert files == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("weights.safetensors")}
    assert again == result


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize(
    "error", [UsageError("shares every layer"), CorruptFile("another asset stands here")]
)
def test_a_pair_that_is_refused_is_listed_with_its_reason_and_the_others_go_on(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = screening.fitted_asset

    def refusing(ours: Any, theirs: Any, *rest: Any, **named: Any) -> Any:
        if ours is sender():
            raise error
        return fit(ours, theirs, *rest, **named)

    monkeypatch.setattr(screening, "fitted_asset", refusing)
    rows = screen([sender(), receiver()], FleetData(documents(), raws()), tmp_path, **options())[
        "pairs"
    ]
    assert [row["sender"] for row in rows] == [receiver().name, sender().name]
    assert rows[0]["verdict"] is not None
    assert (rows[1]["verdict"], rows[1]["reason"]) == (None, str(error))


@pytest.mark.usefixtures("short_windows")
def test_a_bug_in_one_pair_is_not_taken_for_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(screening, "fitted_asset", broken)
    with pytest.raises(ZeroDivisionError):
        screen([sender(), receiver()], FleetData(documents(), raws()), tmp_path, **options())


@pytest.mark.usefixtures("short_windows")
def test_too_few_documents_to_predict_from_cost_the_predictors_not_the_screening(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    few = FleetData(documents(3, 1), raws())
    found = screen(
        [sender(), receiver()], few, tmp_path, **options(predict_only=True, say=said.append)
    )
    assert [row["predictors"] for row in found["pairs"]] == [{}, {}]
    assert sum("at least 4 documents" in line for line in said) == 2


def test_predictors_read_only_the_training_split() -> None:
    texts = [Document(f"x{i}", f"text {i}", f"x{i}") for i in range(60)]
    found = FleetData(texts, [], FRACTIONS).probe()
    assert len(found) == 16
    assert {split_of(d, FRACTIONS) for d in found} == {"train"}
    assert found != texts[:16], "some of the first texts are held out"


def test_rows_of_every_kind_are_data_for_a_screening(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {
            "id": f"r{i}",
            "context": f"Ann {i} is in the hall. ",
            "question": "Where is Ann? In the",
            "answer": " hall",
        }
        for i in range(30)
    ]
    lines += [
        {
            "id": f"m{i}",
            "prompt": f"{i} times: one and one is",
            "options": [" two", " six"],
            "label": 0,
        }
        for i in range(30)
    ]
    lines += [{"id": f"t{i}", "text": f"Text number {i}.", "split": "test"} for i in range(3)]
    lines += [{"id": "bad", "prompt": "One", "options": [" a", " a"], "label": 0, "split": "test"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n", "utf-8")
    found = screen_data(str(path), FRACTIONS)
    held = {raw.id for raw in found.raws}
    assert {kind_of(raw.body) for raw in found.raws} == {
        "recall",
        "multiple_choice",
        "continuation",
    }
    assert {"t0", "t1", "t2", "bad"} <= held
    assert held - {"bad"} == {d.id for d in found.documents if split_of(d, FRACTIONS) == "test"}
    texts = {d.id: d.text for d in found.documents}
    assert texts["r0"] == "Ann 0 is in the hall. Where is Ann? In the hall"
    assert texts["m0"] == "0 times: one and one is two"
    assert "bad" not in texts
    path.write_text('{"id": "x", "split": "test", "other": 1}\n', "utf-8")
    with pytest.raises(EvalError, match="expected a row with text"):
        screen_data(str(path), FRACTIONS)
    with pytest.raises(EvalError, match="at least 4 documents"):
        predictors(sender(), receiver(), found.documents[:2])
