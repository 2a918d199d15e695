from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvbridge.errors import EvalError
from kvbridge.eval.report.summary import dumps, summarise, write_summary
from kvbridge.eval.run.rows import Row, RowWriter, read_rows
from kvbridge.eval.statistics.gated import gate_arrays
from kvbridge.eval.statistics.table import Table, median

MakeRows = Callable[..., list[Row]]
META = {
    "pair": {"sender": "a", "receiver": "b", "digest": "sha256:pair"},
    "timings": {"fit_s": 2.5},
    "r2": [[0.5]],
}


def test_the_summary_is_recomputed_from_the_file_byte_for_byte(
    rows_of: MakeRows, tmp_path: Path
) -> None:
    rows = rows_of(gated=True)
    with RowWriter(tmp_path / "rows.jsonl", rows[0].pair) as writer:
        writer.write_all(rows)
    write_summary(tmp_path / "summary.json", summarise(rows, META))
    again = dumps(summarise(read_rows(tmp_path / "rows.jsonl").rows, META))
    assert again.encode() == (tmp_path / "summary.json").read_bytes()
    assert json.loads(again)["verdict"] == summarise(rows, META)["verdict"]


def test_the_order_of_rows_changes_no_byte(rows_of: MakeRows) -> None:
    rows = rows_of(gated=True)
    shuffled = random.Random(1).sample(rows, len(rows))
    assert dumps(summarise(shuffled, META)) == dumps(summarise(rows, META))


def test_the_shape_that_others_rely_on(rows_of: MakeRows) -> None:
    summary = summarise(rows_of(gated=True), META)
    assert {
        "schema",
        "pair",
        "n",
        "conditions",
        "denominators",
        "verdict",
        "timings",
    } <= summary.keys()
    assert summary["n"] == 240
    assert summary["timings"] == {"fit_s": 2.5}
    assert summary["pair"] == META["pair"]
    for name in (
        "native",
        "sender",
        "translated",
        "no_context",
        "token_only",
        "tail_only32",
        "gated",
    ):
        condition = summary["conditions"][name]
        for metric in (
            "loss",
            "recovery",
            "kl",
            "agreement",
            "accuracy",
            "prefill_share",
            "ttft_ms",
        ):
            value, ci = condition[metric], condition[f"{metric}_ci"]
            if value is None:
                assert ci is None
            else:
                assert ci is None or ci[0] <= value <= ci[1]
    assert summary["conditions"]["sender"]["kl"] is None
    assert summary["conditions"]["sender"]["loss_per_token"] is None
    assert summary["conditions"]["native"]["loss_per_token"] > 0
    assert set(summary["denominators"]) == {"standalone", "cascading"}
    assert set(summary["denominators"]["cascading"]) == {"continuation", "recall"}
    json.dumps(summary, allow_nan=False)


def test_the_figures_are_those_of_a_plain_loop(rows_of: MakeRows) -> None:
    rows = rows_of()
    summary = summarise(rows, META)["conditions"]
    cells = {(r.item, r.task, r.condition): r for r in rows}
    items = sorted({r.item for r in rows})

    def total(condition: str, field: str, task: str = "continuation") -> float:
        return sum(getattr(cells[item, task, condition], field) or 0 for item in items)

    assert summary["translated"]["loss"] == pytest.approx(
        total("translated", "loss") / total("translated", "characters"), rel=1e-5
    )
    recovery = (total("no_context", "loss") - total("translated", "loss")) / (
        total("no_context", "loss") - total("native", "loss")
    )
    assert summary["translated"]["recovery"] == pytest.approx(recovery, rel=1e-5)
    assert summary["translated"]["accuracy"] == pytest.approx(
        total("translated", "correct", "recall") / 120, rel=1e-5
    )
    assert summary["native"]["recovery"] == 1.0
    assert summary["no_context"]["recovery"] == 0.0


def test_kl_and_agreement_are_means_over_positions_not_items(rows_of: MakeRows) -> None:
    rows = [
        replace(r, tokens=1 + index % 60) if r.loss is not None else r
        for index, r in enumerate(rows_of())
    ]
    scored = [r for r in rows if (r.condition, r.task) == ("translated", "continuation")]
    weight = sum(r.tokens for r in scored)
    summary = summarise(rows)["conditions"]["translated"]
    assert summary["kl"] == pytest.approx(
        sum((r.kl or 0) * r.tokens for r in scored) / weight, rel=1e-5
    )
    assert summary["agreement"] == pytest.approx(
        sum((r.agreement or 0) * r.tokens for r in scored) / weight, rel=1e-5
    )
    assert summary["loss_per_token"] == pytest.approx(
        sum(r.loss or 0 for r in scored) / weight, rel=1e-5
    )


def test_recovery_and_the_sender_are_compared_per_character(rows_of: MakeRows) -> None:
    """A sender that scored each continuation with one more character of the same loss rate keeps
    its figures."""
    rows = rows_of()
    stretched = [
        replace(r, characters=2 * r.characters, loss=2 * (r.loss or 0))
        if r.condition == "sender" and r.loss
        else r
        for r in rows
    ]
    plain, other = summarise(rows), summarise(stretched)
    assert plain["conditions"]["sender"]["recovery"] == other["conditions"]["sender"]["recovery"]
    assert (
        plain["denominators"]["cascading"]["continuation"]
        == other["denominators"]["cascading"]["continuation"]
    )


def test_both_denominators(rows_of: MakeRows) -> None:
    rows = rows_of(documents=60)
    summary = summarise(rows)["denominators"]
    right = {
        name: np.array(
            [
                r.correct
                for r in sorted(rows, key=lambda r: r.item)
                if (r.condition, r.task) == (name, "recall")
            ]
        )
        for name in ("native", "sender", "translated")
    }
    t, s, d = right["translated"], right["sender"], right["native"]
    recall = summary["cascading"]["recall"]["translated"]
    assert summary["standalone"]["recall"]["translated"]["retention"]["value"] == pytest.approx(
        t.sum() / d.sum(), rel=1e-5
    )
    assert recall["share_of_gap"]["value"] == pytest.approx(
        (t.sum() - s.sum()) / (d.sum() - s.sum()), rel=1e-5
    )
    parts = recall["identity"]
    assert parts["gained"] - parts["harmed"] == int(t.sum() - s.sum())
    assert recall["over_sender"]["value"] == pytest.approx((t.mean() - s.mean()), rel=1e-5)
    continuation = summary["cascading"]["continuation"]["translated"]
    assert continuation["identity"] is None
    assert continuation["over_sender"]["value"] > 0


def test_the_share_of_the_gap_in_nats_counts_less_loss_as_better(rows_of: MakeRows) -> None:
    rows = rows_of(documents=40)
    rate = {
        name: c["loss"]
        for name, c in summarise(rows)["tasks"]["continuation"]["conditions"].items()
    }
    summary = summarise(rows)["denominators"]["cascading"]["continuation"]["translated"]
    expected = (rate["sender"] - rate["translated"]) / (rate["sender"] - rate["native"])
    assert summary["share_of_gap"]["value"] == pytest.approx(expected, rel=1e-4)
    assert summary["receiver_over_sender"]["value"] == pytest.approx(
        rate["sender"] - rate["native"], rel=1e-4
    )


def test_no_figure_has_more_than_six_digits(rows_of: MakeRows) -> None:
    def walk(value: object) -> None:
        if isinstance(value, dict):
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)
        elif isinstance(value, float):
            assert value == float(f"{value:.6g}")

    walk(summarise(rows_of(gated=True)))


def test_a_gap_that_may_not_exist_is_refused_in_words(rows_of: MakeRows) -> None:
    summary = summarise(rows_of(correct={"native": 0.56, "sender": 0.56}))["denominators"][
        "cascading"
    ]["recall"]
    assert summary["translated"]["share_of_gap"]["value"] is None
    assert "contains 0" in summary["translated"]["share_of_gap"]["refused"]
    assert summary["translated"]["over_sender"]["value"] is not None


def test_failed_excluded_and_missing_rows_are_counted_and_change_nothing_else(
    rows_of: MakeRows,
) -> None:
    rows = rows_of()
    bad = {("d000i0", "translated"): math.nan, ("d000i1", "native"): math.inf}
    changed = []
    for row in rows:
        if row.task == "continuation" and (row.item, row.condition) in bad:
            row = replace(row, loss=bad[row.item, row.condition]).checked()
        elif (row.item, row.task, row.condition) == ("d000i2", "recall", "sender"):
            row = replace(row, status="failed", reason="out of memory", correct=None, f1=None)
        elif (row.item, row.task, row.condition) == ("d000i3", "recall", "token_only"):
            continue
        changed.append(row)
    summary = summarise(changed)
    assert summary["counts"]["excluded"] == 2
    assert summary["counts"]["failed"] == 1
    assert summary["counts"]["missing"] == 1
    assert summary["counts"]["missing_by_condition"] == {"recall/token_only": 1}
    assert summary["counts"]["reasons"] == {
        "excluded: not finite: loss": 2,
        "failed: out of memory": 1,
    }
    recovery = summary["tasks"]["continuation"]["conditions"]["translated"]["recovery"]
    left = [row for row in rows if row.item not in ("d000i0", "d000i1") or row.task == "recall"]
    assert (
        recovery == summarise(left)["tasks"]["continuation"]["conditions"]["translated"]["recovery"]
    )
    assert summary["denominators"]["cascading"]["recall"]["translated"]["n"] == 119


def test_a_row_that_failed_late_keeps_its_figures_out_of_every_mean(rows_of: MakeRows) -> None:
    rows = rows_of(documents=12)
    half = [replace(r, status="failed", reason="cut") if r.document == "doc-3" else r for r in rows]
    without = [r for r in rows if r.document != "doc-3"]
    summary, expected = summarise(half), summarise(without)
    assert summary["conditions"] == expected["conditions"]
    assert summary["denominators"] == expected["denominators"]
    assert summary["counts"]["failed"] == len(rows) - len(without)


def test_one_item_gives_figures_without_intervals(rows_of: MakeRows) -> None:
    summary = summarise(rows_of(documents=1, per_document=1))
    assert summary["conditions"]["translated"]["loss"] > 0
    assert summary["conditions"]["translated"]["loss_ci"] is None
    assert summary["verdict"] == "prefill"
    assert "documents" in summary["headline"]
    dumps(summary)


def test_all_rows_failed_is_still_a_summary(rows_of: MakeRows) -> None:
    rows = [
        replace(
            r,
            status="failed",
            reason="x",
            loss=None,
            kl=None,
            agreement=None,
            correct=None,
            f1=None,
        )
        for r in rows_of(documents=3)
    ]
    summary = summarise(rows)
    assert summary["verdict"] is None
    assert summary["headline"].startswith("Not judged")
    assert summary["counts"]["ok"] == 0
    dumps(summary)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: [], "no rows"),
        (lambda rows: [*rows, rows[0]], "appears twice"),
        (lambda rows: [*rows[1:], replace(rows[0], pair="other")], "rows of 2 pairs"),
        (lambda rows: [*rows[1:], replace(rows[0], document="elsewhere")], "belongs to document"),
        (
            lambda rows: [replace(row, pair="other") for row in rows],
            "expected rows of pair sha256:pair",
        ),
    ],
)
def test_rows_that_are_not_one_table_are_refused(
    rows_of: MakeRows, change: Callable, words: str
) -> None:
    with pytest.raises(EvalError, match=words):
        summarise(change(rows_of(documents=2)), META)


def test_a_gates_score_is_worth_something_or_not(rows_of: MakeRows) -> None:
    rows = rows_of(documents=60, gated=True)
    useful = summarise(rows)["gate"]["recall"]
    assert useful["excess_aurc"] < 0.1
    assert useful["apgr"] > 0.6
    assert useful["cpt_50"] < 0.4
    assert useful["verdicts"]["use"] + useful["verdicts"]["discard"] == 240
    upside_down = [replace(r, score=-r.score) if r.score is not None else r for r in rows]
    assert summarise(upside_down)["gate"]["recall"]["apgr"] < 0.4
    assert summarise(rows_of())["gate"] is None


def test_the_median_interval_is_distribution_free() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        interval = median(rng.lognormal(0, 1.5, 41))
        held += interval.contains(1.0)
    assert 0.94 <= held / 1000 <= 0.99
    assert not median(np.arange(5.0)).known


def test_a_request_the_gate_did_not_score_counts_as_the_riskiest(rows_of: MakeRows) -> None:
    rows = rows_of(gated=True, tasks=("recall",))
    unscored = {row.item for row in rows if row.condition == "gated" and (row.score or 0) > 0.8}
    assert unscored
    bare = [
        replace(r, score=None) if r.condition == "gated" and r.item in unscored else r for r in rows
    ]
    lost, score, items = gate_arrays(Table.of("recall", bare)) or ([], [], [])
    assert len(lost) == len(score) == len({row.item for row in rows})
    first = max(s for s, item in zip(score, items, strict=True) if item not in unscored)
    assert min(s for s, item in zip(score, items, strict=True) if item in unscored) > first
    assert summarise(bare)["gate"]["recall"]["n"] == len(items)
