from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvbridge.eval.report.summary import summarise
from kvbridge.eval.run.rows import Row
from kvbridge.eval.statistics.verdict import PAIR_VERDICTS, Rules

MakeRows = Callable[..., list[Row]]

GOOD = {"translated": 0.97}
GOOD_RECALL = {"translated": 0.84}


def test_the_four_verdicts_are_those_of_the_design() -> None:
    assert PAIR_VERDICTS == ("translate", "translate behind the gate", "cascade instead", "prefill")


def test_translate(rows_of: MakeRows) -> None:
    summary = summarise(rows_of(recovered=GOOD, correct=GOOD_RECALL))
    assert summary["verdict"] == "translate"
    assert summary["headline"].startswith("Translate: translated recovers 97%")


@pytest.mark.parametrize("control", ["token_only", "wrong_document", "tail_only"])
def test_a_control_that_scores_alike_means_prefill_and_leads_the_headline(
    rows_of: MakeRows, control: str
) -> None:
    rows = rows_of(recovered=GOOD | {control: 0.97}, correct=GOOD_RECALL)
    summary = summarise(rows)
    assert summary["verdict"] == "prefill"
    assert summary["headline"].startswith(
        f"Prefill: translated does not significantly beat {control}"
    )
    beaten = {
        c["against"]: c["beats"]
        for c in summary["contrasts"]
        if (c["condition"], c["task"]) == ("translated", "continuation")
    }
    assert beaten[control] is False
    assert sum(not b for b in beaten.values()) == 1


@pytest.mark.parametrize("control", ["token_only", "wrong_document", "tail_only"])
def test_a_control_that_was_not_run_is_not_beaten(rows_of: MakeRows, control: str) -> None:
    summary = summarise(
        [r for r in rows_of(recovered=GOOD, correct=GOOD_RECALL) if r.condition != control]
    )
    assert summary["verdict"] == "prefill"
    assert f"control {control} was not run" in summary["headline"]


def test_no_gain_over_the_sender_means_cascade(rows_of: MakeRows) -> None:
    summary = summarise(rows_of(recovered={"sender": 1.1}, correct={"sender": 0.75}))
    assert summary["verdict"] == "cascade instead"
    assert "against the sender" in summary["headline"]


def test_a_receiver_no_better_than_its_sender_means_cascade(rows_of: MakeRows) -> None:
    summary = summarise(
        rows_of(recovered=GOOD | {"sender": 1.0}, correct=GOOD_RECALL | {"sender": 0.86})
    )
    assert summary["verdict"] == "cascade instead"


def test_harm_where_it_was_not_needed_means_the_gate(rows_of: MakeRows) -> None:
    rows = rows_of(recovered=GOOD, correct=GOOD_RECALL)
    harmed = [
        replace(r, correct=0)
        if r.condition == "translated" and r.correct and int(r.document[4:]) % 8 == 0
        else r
        for r in rows
    ]
    summary = summarise(harmed, rules=Rules(retention_min=0.5))
    assert summary["verdict"] == "translate behind the gate"
    assert "lost that the sender had right" in summary["verdict_reasons"][0]
    assert summarise(rows, rules=Rules(retention_min=0.5))["verdict"] == "translate"


def test_low_retention_means_the_gate(rows_of: MakeRows) -> None:
    summary = summarise(rows_of())
    assert summary["verdict"] == "translate behind the gate"
    assert any("below 90%" in reason for reason in summary["verdict_reasons"])


def test_worse_than_the_sender_in_one_task_means_the_gate(rows_of: MakeRows) -> None:
    summary = summarise(
        rows_of(recovered=GOOD, correct={"translated": 0.50, "native": 0.52}),
        rules=Rules(harm_max=1.0),
    )
    assert summary["verdict"] == "translate behind the gate"
    assert (
        summary["verdict_reasons"][0].startswith("worse than the sender")
        or "recall" in summary["verdict_reasons"][0]
    )


def test_only_the_gate_gains(rows_of: MakeRows) -> None:
    rows = rows_of(recovered={"sender": 0.76}, correct={"sender": 0.74}, gated=True)
    assert summarise(rows)["verdict"] == "translate behind the gate"
    refusing = [replace(r, verdict="discard") if r.condition == "gated" else r for r in rows]
    assert summarise(refusing)["verdict"] == "cascade instead"


def test_a_difference_reads_with_its_interval_unit_and_count(rows_of: MakeRows) -> None:
    headline = summarise(rows_of(recovered=GOOD | {"token_only": 0.98}, correct=GOOD_RECALL))[
        "headline"
    ]
    assert re.search(
        r"token_only: −0\.00\d\d \[−0\.\d{4}, [−+]0\.\d{4}\] nats per character in continuation, n = 120",
        headline,
    )


def test_a_translation_dearer_than_a_prefill_means_prefill(rows_of: MakeRows) -> None:
    rows = [
        replace(r, prefill_share=1.2) if r.condition == "translated" else r
        for r in rows_of(recovered=GOOD, correct=GOOD_RECALL)
    ]
    summary = summarise(rows)
    assert summary["verdict"] == "prefill"
    assert "120% of the receiver's own prefill" in summary["headline"]


def test_without_the_sender_nothing_shows_that_switching_pays(rows_of: MakeRows) -> None:
    summary = summarise(
        [r for r in rows_of(recovered=GOOD, correct=GOOD_RECALL) if r.condition != "sender"]
    )
    assert summary["verdict"] == "prefill"
    assert "sender was not run" in summary["headline"]


def test_nine_documents_are_too_few(rows_of: MakeRows) -> None:
    assert (
        "only 9 documents"
        in summarise(rows_of(documents=9, recovered=GOOD, correct=GOOD_RECALL))["headline"]
    )
    assert (
        summarise(rows_of(documents=12, recovered=GOOD, correct=GOOD_RECALL))["verdict"]
        == "translate"
    )


def test_a_gain_over_a_sender_run_on_few_documents_is_not_shown(rows_of: MakeRows) -> None:
    rows = rows_of(recovered=GOOD, correct=GOOD_RECALL)
    few = [r for r in rows if r.condition != "sender" or int(r.document[4:]) < 8]
    assert summarise(few)["verdict"] == "cascade instead"
    enough = [r for r in rows if r.condition != "sender" or int(r.document[4:]) < 20]
    assert summarise(enough)["verdict"] == "translate"


def test_recall_alone_decides_where_there_is_no_continuation(rows_of: MakeRows) -> None:
    summary = summarise(rows_of(correct=GOOD_RECALL, tasks=("recall",)))
    assert summary["verdict"] == "translate"
    assert (
        summarise(rows_of(correct={"token_only": 0.74}, tasks=("recall",)))["verdict"] == "prefill"
    )


def test_every_translation_meets_its_controls_at_its_own_tail(rows_of: MakeRows) -> None:
    summary = summarise(rows_of(recovered=GOOD, correct=GOOD_RECALL))
    compared = {
        (c["condition"], c["against"]) for c in summary["contrasts"] if c["task"] == "continuation"
    }
    assert {a for c, a in compared if c == "translated_tail32"} == {
        "token_only_tail32",
        "wrong_document_tail32",
        "tail_only32",
        "sender",
    }
    assert {a for c, a in compared if c == "translated"} == {
        "token_only",
        "wrong_document",
        "tail_only",
        "no_context",
        "sender",
    }
    assert summary["contrasts_not_run"] == []


def test_a_control_missing_at_one_tail_is_named_as_not_run(rows_of: MakeRows) -> None:
    rows = [r for r in rows_of(tasks=("continuation",)) if r.condition != "token_only_tail32"]
    summary = summarise(rows)
    missing = {
        "task": "continuation",
        "condition": "translated_tail32",
        "against": "token_only_tail32",
    }
    assert summary["contrasts_not_run"] == [missing]
    assert ("translated_tail32", "token_only") not in {
        (c["condition"], c["against"]) for c in summary["contrasts"]
    }


def test_gated_meets_the_same_translation_and_controls_at_its_tail(rows_of: MakeRows) -> None:
    rows = [replace(r, tail=32) if r.condition == "gated" else r for r in rows_of(gated=True)]
    summary = summarise(rows)
    compared = {c["against"] for c in summary["contrasts"] if c["condition"] == "gated"}
    assert compared == {
        "translated_tail32",
        "token_only_tail32",
        "wrong_document_tail32",
        "tail_only32",
        "sender",
    }
    assert summary["gate"] is not None
    other = [replace(r, tail=17) if r.condition == "gated" else r for r in rows]
    without = summarise(other)
    assert without["gate"]["continuation"]["aurc"] is None, (
        "risk of another repair than the gate's says nothing of the gate"
    )
    assert {n["against"] for n in without["contrasts_not_run"]} >= {
        "translated_tail17",
        "tail_only17",
    }


def test_without_translated_nothing_is_judged(rows_of: MakeRows) -> None:
    summary = summarise([r for r in rows_of() if r.condition in ("native", "sender", "no_context")])
    assert summary["verdict"] is None
    assert summary["headline"].startswith(
        "Not judged: translated was not measured on any item; eval run without --conditions"
    )
