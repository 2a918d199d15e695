"""Every format with every oddity: rows are read as they stand, and what cannot be is left out,
counted and named."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbridge.errors import DataError
from kvbridge.eval.tasks.items import prompt_and_answers, read_raw
from kvbridge.fitting.data import read_documents
from kvbridge.fitting.skipped import Skipped
from tests.fitting.pairs import documents, fitted

Row = dict[str, Any]


def _jsonl(rows: list[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _table(rows: list[Row], delimiter: str) -> bytes:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def _parquet(rows: list[Row]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


def _arrow(rows: list[Row]) -> bytes:
    table, out = pa.Table.from_pylist(rows), io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def _arrow_file(rows: list[Row]) -> bytes:
    table, out = pa.Table.from_pylist(rows), io.BytesIO()
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


FORMATS: dict[str, tuple[str, Callable[[list[Row]], bytes]]] = {
    "jsonl": (".jsonl", _jsonl),
    "json array": (".json", lambda rows: json.dumps(rows, indent=1).encode()),
    "json array in a line": (".json", lambda rows: json.dumps(rows).encode()),
    "json lines": (".json", _jsonl),
    "json data": (".json", lambda rows: json.dumps({"version": 1, "data": rows}).encode()),
    "csv": (".csv", lambda rows: _table(rows, ",")),
    "csv with semicolons": (".csv", lambda rows: _table(rows, ";")),
    "tsv": (".tsv", lambda rows: _table(rows, "\t")),
    "parquet": (".parquet", _parquet),
    "arrow stream": (".arrow", _arrow),
    "arrow file": (".arrow", _arrow_file),
}
TEXT_FORMATS = [name for name, (suffix, _) in FORMATS.items() if suffix[1] in "jct"]
LINES = ["jsonl", "csv", "tsv", "json array"]


def written(folder: Path, kind: str, rows: list[Row], name: str = "data") -> Path:
    suffix, write = FORMATS[kind]
    path = folder / (name + suffix)
    path.write_bytes(write(rows))
    return path


def texts(source: Any) -> list[str]:
    return [document.text for document in read_documents(source)]


TEXTS = ["one", 'two, "quoted"; and\tmore', "three\nlines\n\nof it", " é 漢字 👩‍👩‍👧 ", "007"]


@pytest.mark.parametrize("kind", FORMATS)
def test_texts_are_read_as_they_stand(tmp_path, kind):
    path = written(tmp_path, kind, [{"id": f"0{i}", "text": t} for i, t in enumerate(TEXTS)])
    listed = list(read_documents(path))
    assert [document.text for document in listed] == TEXTS
    assert [document.id for document in listed] == [f"0{i}" for i in range(len(TEXTS))]


@pytest.mark.parametrize("kind", TEXT_FORMATS)
def test_packed(tmp_path, kind):
    path = written(tmp_path, kind, [{"text": text} for text in TEXTS])
    packed = tmp_path / (path.name + ".GZ")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert texts(packed) == TEXTS


@pytest.mark.parametrize("kind", TEXT_FORMATS)
@pytest.mark.parametrize("change", ["mark", "windows", "no last line end"])
def test_bytes_that_say_nothing(tmp_path, kind, change):
    path = written(tmp_path, kind, [{"text": "one"}, {"text": "two"}])
    body = path.read_bytes()
    if change == "mark":
        body = b"\xef\xbb\xbf" + body
    elif change == "windows":
        body = body.replace(b"\n", b"\r\n")
    else:
        body = body.rstrip(b"\n")
    path.write_bytes(body)
    assert texts(path) == ["one", "two"]


def test_paragraphs_with_windows_line_ends(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\nmore\r\n\r\ntwo\r\n")
    assert [text.strip() for text in texts(path)] == ["one\nmore", "two"]


ANSWERS = ["2021-05-03", "2021-05-03 00:00:00", "12:30", "007", "1e5", "True", "null", "NaN", "1.0"]


@pytest.mark.parametrize("kind", FORMATS)
def test_answers_that_look_like_something_else_stay_text(tmp_path, kind):
    rows = [
        {"id": f"q{i}", "context": "In May. ", "question": "When? ", "answer": answer}
        for i, answer in enumerate(ANSWERS)
    ]
    raws = list(read_raw(str(written(tmp_path, kind, rows))))
    assert [prompt_and_answers(raw) for raw in raws] == [
        ("In May. When? ", (answer,)) for answer in ANSWERS
    ]


@pytest.mark.parametrize("kind", FORMATS)
def test_every_answer_dictionary(tmp_path, kind):
    rows: list[Row] = [
        {"id": "a", "context": "c ", "question": "q ", "answers": {"text": ["x", "y"], "at": [0]}},
        {"id": "b", "context": "c ", "question": "q ", "answers": {"text": ["z"], "at": [3]}},
    ]
    if kind in ("csv", "csv with semicolons", "tsv"):
        rows = [{**row, "answers": json.dumps(row["answers"])} for row in rows]
    path = written(tmp_path, kind, rows)
    assert [prompt_and_answers(raw)[1] for raw in read_raw(str(path))] == [("x", "y"), ("z",)]
    assert texts(path) == ["c q x", "c q z"]


def test_dates_of_a_column_are_text(tmp_path):
    rows = [{"prompt": "When? ", "answer": date(2021, 5, 3), "answers": [datetime(2021, 5, 3, 7)]}]
    path = written(tmp_path, "parquet", rows)
    assert next(iter(read_raw(str(path)))).body == {
        "prompt": "When? ",
        "answer": "2021-05-03",
        "answers": ["2021-05-03 07:00:00"],
    }


def test_dates_of_the_hub_are_text(monkeypatch):
    rows = [{"prompt": "When? ", "answer": datetime(2021, 5, 3)}]
    monkeypatch.setattr("datasets.load_dataset", lambda name, streaming: {"test": rows})
    assert next(iter(read_raw("org/name"))).body["answer"] == "2021-05-03"


@pytest.mark.parametrize("kind", FORMATS)
def test_chats_are_running_text(tmp_path, kind):
    chat: Any = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ann."}]
    if kind in ("csv", "csv with semicolons", "tsv"):
        chat = json.dumps(chat)
    assert texts(written(tmp_path, kind, [{"messages": chat, "id": "a"}])) == ["Who?\nAnn."]


def test_parts_of_a_chat():
    parts = [{"type": "text", "text": "See"}, {"type": "image"}, {"type": "text", "text": "this"}]
    rows = [{"messages": [{"content": parts}, {"content": None}, {"content": "So?"}]}]
    assert texts(rows) == ["See\nthis\nSo?"]


def kept_and_said(source: Any) -> tuple[int, str]:
    said: list[str] = []
    kept = list(read_documents(source, Skipped(said.append)))
    assert len(said) <= 1
    return len(kept), "".join(said)


NULL_ROWS: list[Row] = [{"id": f"r{i}", "text": None if i == 250 else "words"} for i in range(300)]


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("jsonl", "data.jsonl line 251"),
        ("csv", "data.csv line 252"),
        ("tsv", "data.tsv line 252"),
        ("json array", "data.json line 1002"),
        ("json data", "data.json row 251"),
        ("parquet", "data.parquet row 251"),
        ("arrow stream", "data.arrow row 251"),
        ("arrow file", "data.arrow row 251"),
    ],
)
def test_a_null_late_in_a_file_is_left_out_counted_and_named(tmp_path, kind, place):
    count, said = kept_and_said(written(tmp_path, kind, NULL_ROWS))
    assert count == 299
    assert said.startswith(f"1 of 300 rows left out: {place}: expected a row with text")


BAD_LINES = {
    "cut off": (b'{"text": "cut', "cannot be read as json"),
    "no object": (b"7", "expected a row with text"),
    "null": (b"null", "expected a row with text"),
    "not utf-8": (b'{"text": "caf\xe9"}', "expected UTF-8"),
    "half an emoji": (b'{"text": "\\ud83d"}', "half a character"),
    "deep": (b"[" * 100_000, "cannot be read as json"),
    "no split": (b'{"text": "x", "split": "held"}', "expected split"),
    "an id twice": (b'{"text": "x", "id": "r7"}', "stands twice"),
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line(tmp_path, bad):
    lines = [json.dumps({"id": f"r{i}", "text": "words"}).encode() for i in range(300)]
    lines[250], reason = BAD_LINES[bad]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    count, said = kept_and_said(path)
    assert count == 299
    assert said.startswith("1 of 300 rows left out: a.jsonl line 251: ")
    assert reason in said
    if bad != "no split":
        skipped = Skipped()
        raws = list(read_raw(str(path), skipped))
        assert len(raws) == 299
        assert "line 251" in str(skipped.line())


@pytest.mark.parametrize(
    "bad", ["x,y,z", "x", 'x"y,z', '"x"y,z', b"caf\xe9,y".decode("latin-1")], ids=repr
)
def test_a_bad_record(tmp_path, bad):
    lines = ["id,text", *(f"r{i},words" for i in range(300))]
    lines[250] = bad
    path = tmp_path / "a.csv"
    path.write_bytes("\n".join(lines).encode("latin-1"))
    skipped = Skipped()
    kept = list(read_documents(path, skipped))
    if bad == 'x"y,z':
        assert (len(kept), skipped.line()) == (300, None)
    else:
        assert len(kept) == 299
        assert "a.csv line 251: " in str(skipped.line())


@pytest.mark.parametrize("kind", ["jsonl", "csv", "json array"])
def test_a_packed_file_that_is_cut_short_keeps_what_was_read(tmp_path, kind):
    rows = [{"id": f"r{i}", "text": os.urandom(500).hex()} for i in range(2000)]
    path = written(tmp_path, kind, rows)
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes())[:-50_000])
    count, said = kept_and_said(packed)
    assert 1000 < count < 2000
    assert "cannot be read" in said


def test_an_array_that_does_not_end_keeps_what_was_read(tmp_path):
    path = written(tmp_path, "json array", [{"text": f"t{i}"} for i in range(300)])
    path.write_bytes(path.read_bytes()[:-10])
    count, said = kept_and_said(path)
    assert count == 299
    assert "data.json line 899: cannot be read as json" in said


@pytest.mark.parametrize("rest", ["broken.jsonl.gz", "broken.parquet", "broken.json"])
def test_a_file_that_is_broken_from_its_beginning_is_said_before_any_is_worked_on(tmp_path, rest):
    written(tmp_path, "jsonl", [{"text": "one"}] * 3, "a")
    (tmp_path / rest).write_bytes(b"{nothing of the kind")
    with pytest.raises(DataError, match=rest):
        next(read_documents(tmp_path))


def test_too_many_bad_rows_are_refused_with_the_first_of_them(tmp_path):
    rows: list[Row] = [{"text": "words" if i % 20 else None, "id": str(i)} for i in range(5000)]
    reading = read_documents(written(tmp_path, "jsonl", rows))
    with pytest.raises(DataError, match=r"51 of .* too many .* data\.jsonl line 1: expected"):
        list(itertools.islice(reading, 1500))  # not at the end of a long fit
    with pytest.raises(DataError, match="20 of 20"):
        next(read_documents({"words": "x"} for _ in range(10**6)))


@pytest.mark.parametrize(("bad", "good", "fine"), [(1, 3, True), (1, 2, False), (4, 60, False)])
def test_few_rows(bad, good, fine):
    rows = [*({"text": f"t{i}"} for i in range(good)), *({"text": None} for _ in range(bad))]
    if fine:
        assert len(texts(rows)) == good
    else:
        with pytest.raises(DataError, match="too many"):
            texts(rows)


def test_a_fit_says_what_it_left_out():
    rows: list[Any] = [*documents(), {"id": "late", "text": None}, {"text": "half \ud83d"}]
    (mark,) = fitted(rows).marks
    assert mark.startswith(f"2 of {len(rows)} rows left out: texts#{len(rows) - 2}: expected")
    assert fitted(rows[:-2]).marks == ()


def test_utf16_is_said(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("text\none\n".encode("utf-16"))
    with pytest.raises(DataError, match="UTF-16"):
        texts(path)


def test_long_cells_and_texts(tmp_path):
    long = "word " * 500_000
    before = csv.field_size_limit()
    for kind in ("csv", "tsv", "json array", "parquet"):
        assert texts(written(tmp_path, kind, [{"text": long}, {"text": "x"}])) == [long, "x"]
    assert csv.field_size_limit() == before
    (tmp_path / "a.txt").write_text(long + "\n\nend", "utf-8")
    assert texts(tmp_path / "a.txt") == [long, "end"]


@pytest.mark.parametrize("rows", [1, 700])
def test_a_list_in_a_cell_is_json_or_refused(tmp_path, rows):
    path = tmp_path / "a.csv"
    cells = '"[""x"", ""y""]"', "\"['x', 'y']\""
    path.write_text("prompt,options\n" + f"q,{cells[0]}\n" * rows + f"q,{cells[1]}\n", "utf-8")
    skipped = Skipped()
    if rows == 1:
        with pytest.raises(DataError, match="expected JSON in column options"):
            list(read_raw(str(path), skipped))
        return
    raws = list(read_raw(str(path), skipped))
    assert [raw.body["options"] for raw in raws] == [["x", "y"]] * rows
    assert skipped.count == 1


def test_labels_and_chances_of_a_table_are_numbers(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('prompt,options,label,chance\nq ,"[""x"", ""y""]",1,0.5\n', "utf-8")
    (raw,) = read_raw(str(path))
    assert prompt_and_answers(raw) == ("q ", ("y",))
    assert raw.body["chance"] == 0.5


PROGRAM = """
import sys
from kvbridge.fitting.data import read_documents
from kvbridge.errors import DataError
try:
    print([document.text for document in read_documents(sys.argv[1])], "datasets" in sys.modules)
except DataError as error:
    print("DataError", error)
"""


@pytest.mark.parametrize("kind", FORMATS)
def test_no_folder_is_needed_to_write_to(tmp_path, kind):
    """A home and a cache below a file cannot be written to, not even by root."""
    path = written(tmp_path, kind, [{"text": "one"}])
    assert _without_home(str(path)) == "['one'] False"


def test_a_cache_that_cannot_be_written_is_said_as_such():
    said = _without_home("org/name", HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9")
    assert said.startswith("DataError org/name: the Hub's cache folder cannot be written to")
    assert "set HF_HOME" in said
    assert "\n" not in said


def _without_home(source: str, **environment: str) -> str:
    below_a_file = {"HOME": "/dev/null/home", "HF_HOME": "/dev/null/home/hf"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, source],
        env={**os.environ, **below_a_file, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("number", "words"), [(28, "disk is full"), (122, "disk is full"), (30, "cannot be written")]
)
def test_a_full_or_read_only_disk(monkeypatch, number, words):
    def load(name: str, streaming: bool) -> Any:
        raise OSError(number, os.strerror(number), "/somewhere")

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(DataError, match=rf"{words} .*HF_HOME"):
        texts("org/name")


def test_saved_to_disk(tmp_path):
    rows = datasets.Dataset.from_list([{"text": f"t{i}"} for i in range(9)])
    rows.select([3, 1]).save_to_disk(tmp_path / "one")
    assert texts(tmp_path / "one") == ["t3", "t1"]
    (tmp_path / "one" / "cache-0123.arrow").write_bytes(b"left by a map")
    assert texts(tmp_path / "one") == ["t3", "t1"]
    splits = {"train": rows, "dev": rows.select([0]), "test": rows.select([5])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "three")
    listed = [(d.split, d.text) for d in read_documents(tmp_path / "three")]
    assert sorted(listed)[-2:] == [("train", "t8"), ("validation", "t0")]
    assert ("test", "t5") in listed
    assert len(listed) == 11
