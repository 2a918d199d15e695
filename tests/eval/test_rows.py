from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kvbridge.errors import CorruptFile, EvalError, UnknownSchema
from kvbridge.eval.run.rows import Row, RowWriter, read_rows

ROW = Row(
    pair="p",
    item="i0",
    document="d0",
    task="continuation",
    condition="native",
    loss=30.5,
    tokens=48,
    characters=210,
)


def filled(path: Path, items: int = 3) -> list[Row]:
    rows = [replace(ROW, item=f"i{index}") for index in range(items)]
    with RowWriter(path, "p") as writer:
        writer.write_all(rows)
    return rows


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    rows = [
        replace(ROW, document="Ünïcode / 文書", kl=0.0, agreement=1.0, conversation="c"),
        replace(ROW, task="recall", correct=1, f1=0.5, chance=0.25, loss=None),
        replace(
            ROW,
            condition="gated",
            verdict="discard",
            score=-3.5,
            flops=1_250_000,
            tail=32,
            prefill_share=1.1,
            ttft_ms=9.0,
        ),
        replace(ROW, condition="sender", status="failed", reason="out of memory", loss=None),
    ]
    with RowWriter(tmp_path / "new" / "rows.jsonl", "p") as writer:
        writer.write_all(rows)
    assert read_rows(tmp_path / "new" / "rows.jsonl", pair="p").rows == rows


def test_a_resumed_run_knows_what_is_done_and_writes_each_row_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    filled(path)
    with RowWriter(path, "p") as writer:
        assert ("i1", "continuation", "native") in writer.done
        assert ("i1", "continuation", "sender") not in writer.done
        with pytest.raises(EvalError, match="already in"):
            writer.write(replace(ROW, item="i1"))
        writer.write(replace(ROW, item="i9"))
    assert [row.item for row in read_rows(path).rows] == ["i0", "i1", "i2", "i9"]


def test_each_row_is_on_disk_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with RowWriter(path, "p") as writer:
        writer.write(ROW)
        assert len(read_rows(path, repair=False).rows) == 1


@pytest.mark.parametrize("cut", [1, 5, 40, -2])
def test_a_torn_last_line_is_cut_off_and_reported(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "rows.jsonl"
    rows = filled(path)
    whole = path.read_bytes()
    line = whole.splitlines(keepends=True)[-1]
    torn = line[:cut]
    path.write_bytes(whole + torn.replace(b"i2", b"i7"))
    looked = read_rows(path, repair=False)
    assert (looked.rows, looked.torn_bytes) == (rows, len(torn))
    assert path.read_bytes() != whole
    with RowWriter(path, "p") as writer:
        assert writer.torn_bytes == len(torn)
        writer.write(replace(ROW, item="i7"))
    assert [row.item for row in read_rows(path).rows] == ["i0", "i1", "i2", "i7"]


def test_a_torn_character_or_zero_bytes_at_the_end_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    filled(path)
    whole = path.read_bytes()
    for tail in (b'{"document": "\xc3', b"\0" * 512, b"{" * 100_000):
        path.write_bytes(whole + tail)
        assert read_rows(path).torn_bytes == len(tail)
        assert path.read_bytes() == whole


def test_a_complete_last_row_without_its_newline_stays(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = filled(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert read_rows(path).rows == rows
    assert path.read_bytes() == whole


def test_a_file_that_is_only_a_torn_line_has_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"sch')
    assert read_rows(path).rows == []
    assert path.read_bytes() == b""


def test_damage_before_the_last_line_is_an_error_and_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    filled(path)
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = lines[0] + lines[1][:30] + b"\n" + lines[2]
    path.write_bytes(damaged)
    with pytest.raises(CorruptFile, match="line 2"):
        read_rows(path)
    assert path.read_bytes() == damaged


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"schema": 2}, UnknownSchema, "schema 1, found 2"),
        ({"tail": 0}, EvalError, "tail must be a whole number ≥ 1"),
        ({"flops": -1}, EvalError, "flops must be a whole number ≥ 0"),
        ({"flops": 1.5}, EvalError, "flops must be a whole number ≥ 0"),
        ({"pair": "q"}, EvalError, "expected rows of pair p, found q"),
        ({"item": "i0"}, EvalError, "already on line 1"),
        ({"correct": 2}, EvalError, "correct must be one of 0, 1"),
        ({"correct": True}, EvalError, "correct must be one of"),
        ({"agreement": 1.2}, EvalError, r"agreement must lie in \[0, 1\]"),
        ({"task": "poetry"}, EvalError, "task must be one of"),
        ({"verdict": "maybe"}, EvalError, "verdict must be one of"),
        ({"status": "lost"}, EvalError, "status must be one of"),
        ({"loss": "30"}, EvalError, "loss must be a number"),
        ({"loss": -1.0}, EvalError, "not a possible loss"),
        ({"characters": 0}, EvalError, "over 0 characters"),
        ({"tokens": -1}, EvalError, "tokens must be a whole number"),
        ({"document": ""}, EvalError, "document must be a non-empty string"),
        ({"colour": "blue"}, CorruptFile, "unknown fields"),
    ],
)
def test_rows_that_cannot_be_are_refused_with_their_line(
    tmp_path: Path, change: dict, error: type, words: str
) -> None:
    path = tmp_path / "rows.jsonl"
    filled(path, items=1)
    with path.open("a") as file:
        file.write(json.dumps(asdict(replace(ROW, item="i1")) | change) + "\n")
    with pytest.raises(error, match=words) as caught:
        read_rows(path, pair="p")
    assert "line 2" in str(caught.value)


def test_a_row_that_lacks_a_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    record = asdict(ROW)
    del record["document"]
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(CorruptFile, match="lacks \\['document'\\]"):
        read_rows(path)


def test_two_pairs_in_one_file_are_refused_without_being_asked(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(asdict(replace(ROW, pair=p, item=p))) + "\n" for p in "pq"))
    with pytest.raises(EvalError, match="found q"):
        read_rows(path)


@pytest.mark.parametrize("field", ["loss", "kl", "agreement", "ttft_ms", "score", "f1"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_not_finite_excludes_the_row_and_says_why(
    tmp_path: Path, field: str, value: float
) -> None:
    path = tmp_path / "rows.jsonl"
    with RowWriter(path, "p") as writer:
        stored = writer.write(replace(ROW, **cast(Any, {field: value})))
    assert (stored.status, stored.reason, stored.loss) == ("excluded", f"not finite: {field}", None)
    assert "NaN" not in path.read_text()
    assert "Infinity" not in path.read_text()
    assert read_rows(path).rows == [stored]


def test_a_nan_written_by_someone_else_is_excluded_on_reading(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(asdict(replace(ROW, kl=math.nan))) + "\n")
    assert read_rows(path).rows[0].status == "excluded"


def test_a_failed_row_stays_failed_even_with_a_nan(tmp_path: Path) -> None:
    stored = replace(ROW, loss=math.nan, status="failed", reason="crashed").checked()
    assert (stored.status, stored.reason, stored.loss) == ("failed", "crashed", None)


def test_figures_of_numpy_are_figures() -> None:
    assert replace(ROW, kl=np.float64(0.5)).checked().kl == 0.5
    with pytest.raises(EvalError, match="kl must be a number"):
        replace(ROW, kl=cast(Any, True)).checked()


def test_two_writers_cannot_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with RowWriter(path, "p"), pytest.raises(EvalError, match="being written by another run"):
        RowWriter(path, "p")
    with RowWriter(path, "p") as writer:
        writer.write(ROW)


def test_the_writer_refuses_another_pair_and_an_existing_file_of_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    filled(path)
    with RowWriter(path, "p") as writer, pytest.raises(EvalError, match="expected a row of pair p"):
        writer.write(replace(ROW, item="new", pair="q"))
    before = path.read_bytes()
    with pytest.raises(EvalError, match="expected rows of pair q, found p"):
        RowWriter(path, "q")
    assert path.read_bytes() == before


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="does not exist"):
        read_rows(tmp_path / "rows.jsonl")


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    assert read_rows(tmp_path / "rows.jsonl").rows == []


def test_a_batch_with_a_row_twice_is_refused_whole(tmp_path: Path) -> None:
    one = Row(pair="p", item="a", document="d", task="recall", condition="native", correct=1)
    with RowWriter(tmp_path / "rows.jsonl", "p") as writer:
        with pytest.raises(EvalError, match="already in"):
            writer.write_all([one, one])
        assert writer.write_all([one]) == [one]
    assert len(read_rows(tmp_path / "rows.jsonl").rows) == 1
