"""Which rows become items: ids, documents, options, and whose text stands in as the wrong
document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbridge.cli.evaluate import EvalCommand, run_eval
from kvbridge.errors import EvalError
from kvbridge.eval.tasks import kind_of
from kvbridge.eval.tasks.chosen import donors, make_items
from kvbridge.eval.tasks.items import Item, RawItem, demo_rows, read_raw
from kvbridge.fitting.data import read_documents
from tests.fitting.pairs import receiver, sender
from tests.models import random_texts


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def test_ids_that_meet_the_name_of_a_texts_second_part_are_refused() -> None:
    text = " ".join(random_texts(12, 400))
    raws = [RawItem(name, name, {"text": text}) for name in ("a", "a+1")]
    with pytest.raises(EvalError, match=r"one item 'a\+1' of continuation, found two"):
        make_items(raws, sender(), receiver())
    short = [raws[0], RawItem("a+1", "b", {"text": "too short"})]
    with pytest.raises(EvalError, match="found two"):
        make_items(short, sender(), receiver())


def test_an_empty_document_or_id_is_none_for_the_fit_and_for_the_evaluation(tmp_path: Path) -> None:
    rows = (
        {"id": "a", "document": "", "text": "x"},
        {"id": "", "text": "y"},
        {"id": 0, "text": "z"},
    )
    data = written(tmp_path / "rows.jsonl", *rows)
    names = ["a", "rows.jsonl#1", "0"]
    assert [raw.document for raw in read_raw(data)] == names
    assert [document.group for document in read_documents(data)] == names


def test_questions_about_one_context_are_one_document(tmp_path: Path) -> None:
    rows = [
        {"context": "c" * n, "question": f"q{k}", "answer": " a"} for n in (5, 6) for k in range(3)
    ]
    listed = list(read_raw(written(tmp_path / "rows.jsonl", *rows)))
    assert len({raw.document for raw in listed[:3]}) == 1
    assert len({raw.document for raw in listed}) == 2
    named = list(
        read_raw(
            written(
                tmp_path / "named.jsonl",
                *({**row, "document": str(i)} for i, row in enumerate(rows)),
            )
        )
    )
    assert [raw.document for raw in named] == [str(i) for i in range(6)]


def test_options_must_be_a_list() -> None:
    raw = RawItem("q", "d", {"context": "Once", "options": "abc", "label": 1})
    _, excluded = make_items([raw], sender(), receiver())
    assert "options as a list" in excluded[0].reason


def test_options_beside_an_answer_are_recall_unless_the_task_says_otherwise() -> None:
    row = {"context": "c", "question": "q", "answer": " a", "options": [" a", " b"]}
    assert kind_of(row) == "recall"
    assert kind_of({**row, "task": "multiple_choice"}) == "multiple_choice"
    assert {kind_of(raw.body) for raw in demo_rows("recall")} == {"recall"}


def test_a_wrong_document_does_not_share_the_prompts_beginning() -> None:
    shared, *others = random_texts(4, 600)
    item = lambda name, text: Item(name, name, "recall", text, (" end",))  # noqa: E731
    by_item = donors(
        [item("a", shared + " one"), item("b", shared + " two"), *(item(t[:9], t) for t in others)]
    )
    for name in ("a", "b"):
        assert shared[:200] not in by_item[name]
        assert len(by_item[name]) >= 1.5 * 600
    assert donors([item("a", shared + " one"), item("b", shared + " two")]) == {"a": "", "b": ""}


def test_a_run_is_not_continued_with_other_texts(
    demo_asset: Path, demo_data: Path, tmp_path: Path
) -> None:
    lines = (demo_data / "test.jsonl").read_text("utf-8").splitlines()
    rows = [{k: v for k, v in json.loads(line).items() if k != "split"} for line in lines]
    data = written(tmp_path / "one.jsonl", *rows)
    other = written(tmp_path / "two.jsonl", *({**row, "id": f"other {row['id']}"} for row in rows))

    def run(source: str, limit: int) -> None:
        run_eval(
            EvalCommand(
                demo_asset,
                tmp_path / "run",
                data=source,
                conditions=("native",),
                limit=limit,
                as_json=True,
            )
        )

    run(data, 2)
    run(data, 3)
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()
    assert before.count(b"\n") == 3
    with pytest.raises(EvalError, match="rows are of other texts"):
        run(other, 3)
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == before


def test_a_gate_says_that_it_runs_in_one_process(
    demo_asset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_eval(
        EvalCommand(
            demo_asset,
            tmp_path,
            conditions=("native",),
            tasks=("recall",),
            limit=2,
            gate="always-refuse",
            processes=2,
            as_json=True,
        )
    )
    assert "a gate runs in one process" in capsys.readouterr().err
