"""Texts from files, folders and Python: what is read, how it is split, and a clear DataError for
what cannot be."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbridge.errors import DataError
from kvbridge.fitting.data import Document, read_documents
from kvbridge.fitting.folders import SPLITS
from kvbridge.fitting.hub_rows import LOGGERS
from kvbridge.fitting.splits import Splits, split_of
from kvbridge.geometry import short_name

FRACTIONS = (0.8, 0.1, 0.1)
PINNED = [1, 2, 5, 8, 18, 19]  # of group-0 to group-19: the draw is the same on every machine


def jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def parquet(path: Path, **columns: list) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def texts(source) -> list[str]:
    return [d.text for d in read_documents(source)]


def test_jsonl_keeps_ids_groups_and_splits(tmp_path):
    path = jsonl(
        tmp_path / "a.jsonl",
        [
            {"id": "x", "document": "d", "split": "test", "text": "one"},
            {"id": 7, "text": "two\nlines"},
            {"text": "three", "document": "d", "split": None},
        ],
    )
    documents = list(read_documents(path))
    assert documents[0] == Document("x", "one", "d", "test")
    assert (documents[1].id, documents[1].group, documents[1].split) == ("7", "7", None)
    assert (documents[2].id, documents[2].group, documents[2].split) == ("a.jsonl#2", "d", None)


def test_parquet(tmp_path):
    path = parquet(
        tmp_path / "a.parquet", text=["one", "two"], document=["d", "d"], split=["train", None]
    )
    assert [(d.text, d.group, d.split) for d in read_documents(str(path))] == [
        ("one", "d", "train"),
        ("two", "d", None),
    ]


def test_txt_is_read_by_paragraph(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("First paragraph,\nstill the first.\n\nSecond.\n\n\n\nThird é.\n", "utf-8")
    assert [t.strip() for t in texts(path)] == [
        "First paragraph,\nstill the first.",
        "Second.",
        "Third é.",
    ]


def test_a_folder_whose_file_names_are_splits(tmp_path):
    for split in SPLITS:
        jsonl(tmp_path / f"{split}.jsonl", [{"text": f"{split} {i}"} for i in range(2)])
    jsonl(tmp_path / "recall.jsonl", [{"question": "not a text"}])
    (tmp_path / "notes.md").write_text("not data")
    documents = list(read_documents(tmp_path))
    assert [(d.split, d.text) for d in documents] == [
        (s, f"{s} {i}") for s in sorted(SPLITS) for i in range(2)
    ]


def test_a_folder_of_other_files_is_read_whole(tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    (tmp_path / "b.txt").write_text("two")
    assert [(d.text.strip(), d.split) for d in read_documents(tmp_path)] == [
        ("one", None),
        ("two", None),
    ]


def test_python_strings_mappings_and_documents():
    own = Document("z", "three", "g", "train")
    documents = list(read_documents(["one", {"text": "two", "id": "b"}, own, "  \n"]))
    assert [d.text for d in documents] == ["one", "two", "three"]
    assert documents[2] is own
    assert len({d.id for d in documents}) == 3
    assert texts(iter(["lazy"])) == ["lazy"]


def test_questions_among_texts_are_running_text(tmp_path):
    """One file serves a fit and an evaluation; a reader of columns fills what a row lacks with
    null."""
    rows = [
        {"text": "Plain."},
        {"text": None, "context": "Tom has the key. ", "question": "Who has it? ", "answer": "Tom"},
        {"text": None, "prompt": "Who? ", "answers": ["Ann", "Anne"]},
        {"text": None, "context": "No answer."},
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    expected = ["Plain.", "Tom has the key. Who has it? Tom", "Who? Ann", "No answer."]
    assert [d.text for d in read_documents(str(path))] == expected


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"id": 1}], "text"),
        ([{"text": None, "answer": "alone"}], "text"),
        ([{"text": None}], "text"),
        ([{"text": float("nan")}], "text"),
        ([{"text": ["a", "b"]}], "text"),
        ([{"text": 5}], "text"),
        ([5], "text"),
        ([None], "text"),
        ([b"bytes"], "text"),
        ([{"text": "a", "split": "held"}], "split"),
        ([{"text": "a", "split": 3}], "split"),
        ([Document("a", "b", "c", "held")], "split"),
        ([{"text": "a", "id": 1}, {"text": "b", "id": "1"}], "twice"),
        ([Document("a", "b", "c"), Document("a", "d", "e")], "twice"),
    ],
)
def test_rows_that_cannot_be_used(rows, words):
    with pytest.raises(DataError, match=words):
        list(read_documents(rows))


@pytest.mark.parametrize(
    "source", [None, 5, 3.5, {"text": "one document, not rows"}, b"bytes", object()]
)
def test_sources_that_cannot_be_used(source):
    with pytest.raises(DataError):
        list(read_documents(source))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.txt", "a.json"])
def test_an_empty_file(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(DataError, match="empty"):
        list(read_documents(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": "good"}\n{"text": "cut of'),
        ("a.jsonl", b"plain words, no JSON\n"),
        ("a.jsonl", b"\xff\xfe\x00\x01 not utf-8"),
        ("a.jsonl", b"[" * 5000),
        ("a.json", b"{"),
        ("a.parquet", b"PAR1 but nothing behind it PAR1"),
        ("a.txt", b"caf\xe9 in latin-1"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"a\.(jsonl|json|parquet|txt)"):
        list(read_documents(tmp_path / name))


@pytest.mark.parametrize("reader", LOGGERS)
def test_what_a_reader_of_the_hub_raises_is_not_logged_as_well(monkeypatch, reader):
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("datasets")
    log.addHandler(handler)

    def rows():
        yield {"text": "one"}
        logging.getLogger(reader).error("about to raise")
        raise ValueError("a broken file")

    monkeypatch.setattr("datasets.load_dataset", lambda name, streaming: {"train": rows()})
    try:
        documents = read_documents("org/name")
        assert next(documents).split == "train"
        logging.getLogger(reader).error("between rows")
        with pytest.raises(DataError, match="a broken file"):
            next(documents)
        assert [r.getMessage() for r in records] == ["between rows"], "only the read is silent"
    finally:
        log.removeHandler(handler)


def test_columns_of_files_that_cannot_be_used(tmp_path):
    for path in (
        jsonl(tmp_path / "missing.jsonl", [{"body": "a"}]),
        jsonl(tmp_path / "none.jsonl", [{"text": "a"}, {"text": None}]),
        parquet(tmp_path / "numbers.parquet", text=[1.0, float("nan")]),
        parquet(tmp_path / "none.parquet", text=["a", None]),
        parquet(tmp_path / "missing.parquet", words=["a"]),
    ):
        with pytest.raises(DataError, match="text"):
            list(read_documents(path))


def test_a_huge_line_is_one_document(tmp_path):
    long = "word " * 2_500_000
    path = jsonl(tmp_path / "a.jsonl", [{"text": "short"}, {"text": long}])
    assert [len(t) for t in texts(path)] == [5, len(long)]


def test_paths_that_are_not_there(tmp_path):
    for source in (tmp_path / "missing.jsonl", "missing", "./a/b", "~/nothing/here", ""):
        with pytest.raises(DataError):
            list(read_documents(source))
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "empty", tmp_path):
        with pytest.raises(DataError, match="jsonl"):
            list(read_documents(source))
    (tmp_path / "a.docx").write_text("text\none\n")
    with pytest.raises(DataError, match="docx"):
        list(read_documents(tmp_path / "a.docx"))


def test_a_hub_id_without_a_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="nobody/such-texts"):
        list(read_documents("nobody/such-texts"))


def test_splits_are_stable_and_follow_the_group():
    drawn = [split_of(Document(f"{i}", "", f"group-{i // 3}"), FRACTIONS) for i in range(3000)]
    assert all(len(set(drawn[i : i + 3])) == 1 for i in range(0, 3000, 3))
    share = {s: drawn.count(s) / 3000 for s in SPLITS}
    assert abs(share["train"] - 0.8) < 0.04
    assert abs(share["test"] - 0.1) < 0.03
    assert [i for i, split in enumerate(drawn[:60:3]) if split != "train"] == PINNED
    assert split_of(Document("a", "", "group-0", "test"), FRACTIONS) == "test"


def test_a_group_in_two_splits_is_refused():
    splits = Splits()
    splits.add(Document("a", "x", "g"), "train")
    splits.add(Document("b", "y", "g"), "train")
    with pytest.raises(DataError, match="'g' stands in train and in test"):
        splits.add(Document("c", "z", "g"), "test")


def test_an_empty_split_is_refused_by_name():
    splits = Splits()
    splits.add(Document("a", "x", "a"), "train")
    with pytest.raises(DataError, match="none for validation, test"):
        splits.check()


def test_the_corpus_digest_covers_ids_splits_texts_and_order():
    def digest(*documents: tuple[str, str, str]) -> str:
        splits = Splits()
        for identity, text, split in documents:
            splits.add(Document(identity, text, identity), split)
        return splits.digest

    base = digest(("a", "x", "train"), ("b", "y", "test"))
    assert base == digest(("a", "x", "train"), ("b", "y", "test"))
    assert (
        len(
            {
                base,
                digest(("b", "y", "test"), ("a", "x", "train")),
                digest(("a", "x", "train"), ("b", "z", "test")),
                digest(("a", "x", "train"), ("c", "y", "test")),
                digest(("a", "x", "train"), ("b", "y", "train")),
                digest(("a", "\udcff", "train")),
            }
        )
        == 6
    )


def test_names_of_fitted_documents_are_kept_unless_there_are_too_many(monkeypatch):
    splits = Splits()
    for number, split in enumerate(("train", "validation", "test", "train")):
        splits.add(Document(f"t{number}", "text", f"d{number}"), split)
    assert splits.fitted_on() == tuple(sorted(short_name(f"d{n}") for n in (0, 1, 3)))
    monkeypatch.setattr("kvbridge.fitting.splits.MOST_NAMES", 2)
    assert splits.fitted_on() is None
