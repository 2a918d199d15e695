"""Chat logs that all begin with one long system prompt: what is held out was not fitted on."""

from __future__ import annotations

import itertools
import json

import pytest

import kvbridge
from kvbridge import demo
from kvbridge.duplicates import NearDuplicates
from kvbridge.errors import DataError
from kvbridge.eval.tasks.chosen import make_items
from kvbridge.eval.tasks.items import RawItem
from kvbridge.fitting.data import Document
from kvbridge.fitting.splits import Splits, split_of
from kvbridge.gates.calibrate.config import GateConfig
from kvbridge.gates.calibrate.job import parted
from kvbridge.gates.calibrate.passing import Sample

CONFIG = {"layers": 2, "max_tokens": 96, "cosine_documents": 2}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    with open(demo.texts("train"), encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in itertools.islice(lines, 160)]


@pytest.fixture(scope="module")
def pair():
    return kvbridge.load("demo:sender"), kvbridge.load("demo:receiver")


def system(texts: list[str], words: int) -> str:
    return " ".join(texts[0].split()[:words]) + "\n"


def fitted(pair, documents, **options):
    config = kvbridge.FitConfig(**{**CONFIG, **options})
    return kvbridge.fit(*pair, documents, config=config)


def test_nothing_but_the_system_prompt_is_refused(pair, texts):
    logs = [
        {"id": str(i), "text": system(texts, 110) + "User: " + text[:300]}
        for i, text in enumerate(texts)
    ]
    with pytest.raises(DataError, match="rows were left out because their text up to there"):
        fitted(pair, logs)


def test_beyond_the_system_prompt_rows_are_scored_and_the_rest_is_said(pair, texts):
    logs = [
        {"id": str(i), "text": system(texts, 30) + "User: " + text[:300]}
        for i, text in enumerate(texts)
    ]
    fit = fitted(pair, logs)
    scores = fit.scores.to_json()["v_r2"]
    assert sum(scores) / len(scores) < 0.95
    assert any("rows: their text up to there" in mark for mark in fit.marks)
    assert fit.left_out.rows["test"] + fit.left_out.rows["validation"] > 300
    assert "rows left out" in fit.left_out.lines()[0]
    plain = fitted(pair, [{"id": str(i), "text": text} for i, text in enumerate(texts)])
    assert plain.marks == ()
    shared = sum(plain.left_out.rows.values())
    assert shared < 0.01 * sum(part["rows"] for part in plain.splits.values())


def test_the_same_texts_under_other_ids_and_splits_are_refused(pair, texts):
    documents = [
        {"id": f"{split}{i}", "text": text, "split": split}
        for split in ("train", "validation", "test")
        for i, text in enumerate(texts[:60])
    ]
    with pytest.raises(DataError, match="left out"):
        fitted(pair, documents)


def test_texts_with_another_first_word_count_as_the_same(pair, texts):
    """No beginning is shared, and yet nothing is new: found only as near duplicates."""
    documents = [
        {"id": f"{split}{i}", "text": f"{split.title()}: {text}", "split": split}
        for split in ("train", "validation", "test")
        for i, text in enumerate(texts[:60])
    ]
    with pytest.raises(DataError, match="nearly repeat"):
        fitted(pair, documents)
    twice = fitted(pair, documents, near_duplicates=None)
    scores = twice.scores.to_json()["v_r2"]
    honest = fitted(pair, [{"id": str(i), "text": text} for i, text in enumerate(texts)])
    clean = honest.scores.to_json()["v_r2"]
    assert sum(scores) > sum(clean), "what near duplicates do to a score"


def test_near_duplicates_go_where_the_first_of_them_went(texts):
    splits, fractions = Splits(NearDuplicates()), (0.6, 0.2, 0.2)
    long = [text for text in texts if len(text) > 500][:60]
    placed = []
    for number, text in enumerate(long):
        name = f"a{number}"
        placed.append(splits.place(Document(name, text, name), fractions))
    again = []
    for number, text in enumerate(long):
        name = f"b{number}"
        again.append(splits.place(Document(name, "Again: " + text, name), fractions))
        follows = splits.place(Document(name + "+", "one more of it", name), fractions)
        assert follows == again[-1], "texts of a document stay together"
    assert again == placed
    drawn = [split_of(Document("", "", f"b{i}"), fractions) for i in range(len(long))]
    assert splits.moved == sum(a != b for a, b in zip(drawn, placed, strict=True)) > 0


def test_a_stated_split_is_not_changed(texts):
    splits = Splits(NearDuplicates())
    text = max(texts, key=len)
    assert splits.place(Document("a", text, "a", "train"), (0.8, 0.1, 0.1)) == "train"
    assert splits.place(Document("b", "Again: " + text, "b", "test"), (0.8, 0.1, 0.1)) is None
    assert splits.place(Document("c", "Also: " + text, "c", "train"), (0.8, 0.1, 0.1)) == "train"
    assert splits.left_out == {"train": 0, "validation": 0, "test": 1}
    assert splits.fitted_on() is not None
    assert len(splits.fitted_on()) == 2


def test_evaluation_items_that_repeat_one_another_are_one_document(pair, texts):
    long = [text for text in texts if len(text) > 1100][:6]
    raws = [RawItem(f"a{i}", f"a{i}", {"text": text}) for i, text in enumerate(long)]
    raws += [RawItem(f"b{i}", f"b{i}", {"text": "Again: " + text}) for i, text in enumerate(long)]
    raws += [RawItem(f"c{i}", f"c{i}", {"text": text}) for i, text in enumerate(long)]
    items, _ = make_items(raws, *pair)
    assert len(items) >= 18
    assert len({item.document for item in items}) == len(long)
    alone, _ = make_items(raws[:6], *pair)
    assert {item.document for item in alone} == {f"a{i}" for i in range(6)}


def test_calibration_texts_that_repeat_one_another_are_in_one_part(texts):
    long = [text for text in texts if len(text) > 600][:40]
    samples = [Sample(f"a{i}", f"a{i}", text, (200,)) for i, text in enumerate(long)]
    samples += [Sample(f"b{i}", f"b{i}", "Again: " + text, (207,)) for i, text in enumerate(long)]
    parts = parted(samples, GateConfig())
    part_of = {sample.id: name for name, some in parts.items() for sample in some}
    assert all(part_of[f"a{i}"] == part_of[f"b{i}"] for i in range(len(long)))
    assert len(part_of) == len(samples)
