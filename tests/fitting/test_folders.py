"""Which files a path names: exactly these, in subfolders too, and of which split each is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbridge.errors import DataError
from kvbridge.fitting.data import read_documents
from kvbridge.fitting.folders import files_of


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"text": text}) + "\n", "utf-8")


def listed(folder: Path) -> list[tuple[str | None, str]]:
    return [(document.split, document.text) for document in read_documents(folder)]


NAMES = ["run[1]", "what?", "alone[2]", "a{b,c}", "all*", "**", "[!x]", "a,b", "per%20cent", "#1"]
MATCHED = ["run1", "whatX", "a", "ab", "ac", "alone2", "allX", "x", "per cent"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz"])
def test_a_name_is_no_pattern(tmp_path, name, suffix):
    for other in MATCHED:
        write(tmp_path / other / f"train{suffix}".removesuffix(".gz"), f"of {other}")
        write(tmp_path / f"{other}.jsonl", f"of {other}")
    write(tmp_path / name / f"train{suffix}".removesuffix(".gz"), "right")
    write(tmp_path / f"{name}.jsonl", "right")
    assert listed(tmp_path / name) == [("train", "right")]
    assert [text for _, text in listed(tmp_path / f"{name}.jsonl")] == ["right"]


@pytest.mark.parametrize("name", ["run*", "run?", "[r]un1", "**", "*/*"])
def test_a_pattern_is_no_name(tmp_path, monkeypatch, name):
    write(tmp_path / "run1" / "train.jsonl", "never")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError):
        listed(tmp_path / name)
    with pytest.raises(DataError):
        list(read_documents(f"{name}.jsonl"))


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"),
        ("TRAIN.JSONL", "train"),
        ("Train-00000-of-00004.jsonl", "train"),
        ("train-00001-of-00004-a09b74b3ef9c3b56.jsonl", "train"),
        ("wikitext-2-train-00000-of-00002.jsonl", "train"),
        ("train_07.jsonl", "train"),
        ("training.jsonl", "train"),
        ("val.jsonl", "validation"),
        ("valid.jsonl", "validation"),
        ("dev.jsonl", "validation"),
        ("Dev-00000-of-00001.jsonl", "validation"),
        ("testing.jsonl", "test"),
        ("dev/0000.jsonl", "validation"),
        ("en/test/part.jsonl", "test"),
        ("train/test.jsonl", "test"),
        ("trainer.jsonl", None),
        ("test-notes.jsonl", None),
        ("developers.jsonl", None),
        ("value.jsonl", None),
        ("latest.jsonl", None),
        ("strain-00000-of-00001.jsonl", None),
        ("tested/a.jsonl", None),
    ],
)
def test_names_of_splits(tmp_path, name, split):
    write(tmp_path / "data" / name, "x")
    assert listed(tmp_path / "data") == [(split, "x")]


@pytest.mark.parametrize("stated", ["dev", "Val", "VALIDATION", "valid"])
def test_a_row_may_call_its_split_so(stated):
    (document,) = read_documents([{"text": "x", "split": stated}])
    assert document.split == "validation"


def test_subfolders_are_read_in_order_and_what_is_hidden_is_not(tmp_path):
    for name in ("b.jsonl", "a/2.jsonl", "a/1.jsonl", "a/deep/er/3.jsonl"):
        write(tmp_path / name, name)
    for name in (".cache/x.jsonl", "a/.hidden.jsonl", "__MACOSX/y.jsonl", "a/dataset_infos.json"):
        write(tmp_path / name, "hidden")
    (tmp_path / "a" / "back").symlink_to(tmp_path)
    names = ["a/1.jsonl", "a/2.jsonl", "a/deep/er/3.jsonl", "b.jsonl"]
    assert [text for _, text in listed(tmp_path)] == names
    assert [file.name for file in files_of(str(tmp_path))] == names
    identities = [document.id for document in read_documents(tmp_path)]
    assert identities == [f"{name}#{number}" for number, name in enumerate(names)]


def test_a_state_of_anything_else_hides_nothing(tmp_path):
    write(tmp_path / "a.jsonl", "x")
    (tmp_path / "state.json").write_text('{"step": 3}', "utf-8")
    assert [text for _, text in listed(tmp_path)] == ["x"]


def test_a_link_that_leads_nowhere_is_said(tmp_path):
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "gone.jsonl")
    for source in (tmp_path / "a.jsonl", tmp_path):
        with pytest.raises(DataError, match="may be read"):
            listed(source)
