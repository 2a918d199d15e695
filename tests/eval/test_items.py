"""Rows that become items: texts without spaces, answers as they are given, prompts that end in a
space, and what is said of those that do not."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import regex
import torch

from kvbridge import demo
from kvbridge.errors import DataError, EvalError
from kvbridge.eval.run.config import RunConfig
from kvbridge.eval.run.evaluate import evaluate
from kvbridge.eval.tasks import kind_of
from kvbridge.eval.tasks.base import following_ids, joined_ids
from kvbridge.eval.tasks.boundaries import shared_boundary, shared_ends
from kvbridge.eval.tasks.chosen import Excluded, commonest_reasons, make_items
from kvbridge.eval.tasks.continuation import Continuation
from kvbridge.eval.tasks.items import RawItem, demo_rows, prompt_and_answers, read_raw
from kvbridge.fitting.skipped import Skipped
from kvbridge.geometry import digest_text
from kvbridge.model.load import load
from kvbridge.model.text import Encoding
from tests.eval.test_plans import setup
from tests.fitting.pairs import receiver, sender
from tests.models import TOKENIZERS, random_texts, tiny

DEMO_ITEMS = "5dcd7e6cb1ef691ea73357f0584bb0224277206c161baee4d8b728762179ff5e"
"""Of the items of the demo's first 40 texts, as they were when only spaces were looked for."""


def test_items_of_texts_with_spaces_are_what_they_were() -> None:
    rows = list(islice(demo_rows("test"), 40))
    items, excluded = make_items(rows, load("demo:sender"), load("demo:receiver"))
    assert not excluded
    lines = [repr((i.id, i.document, i.task, i.prompt, i.answers)) for i in items]
    assert digest_text("\n".join(lines)) == DEMO_ITEMS


def _chinese(rng: random.Random) -> str:
    words = [chr(rng.randint(0x4E00, 0x5E00)) for _ in range(60)]
    return "".join(rng.choice(words) + rng.choice(["", "", "，", "。"]) for _ in range(900))


def _thai(rng: random.Random) -> str:
    return "".join(rng.choices(["สวัสดี", "ครับ", "น้ำ", "ก็", "ผู้", "ที่นี่", "ไทย"], k=500))


def _code(rng: random.Random) -> str:
    pieces = ["if(x){", "y=", "a[0]", ";", "}", "f(", ")", "+=", "1", "return(z)"]
    return "".join(rng.choices(pieces, k=900))


def _emoji(rng: random.Random) -> str:
    return "".join(rng.choices(["👨‍👩‍👧", "🇩🇪", "👍🏽", "e\u0301", "🙂", "\r\n"], k=500))


def _letters(rng: random.Random) -> str:
    return "".join(rng.choices("acgt", k=2500))


def _indented(rng: random.Random) -> str:
    return "".join(rng.choices(["    ", "x=1;\n", "\t", "y+=z;\n"], k=900))


TIGHT = {
    "chinese": _chinese,
    "chinese with a word or two": lambda rng: f"This is {_chinese(rng)[:200]} a b {_chinese(rng)}",
    "thai": _thai,
    "code": _code,
    "emoji": _emoji,
    "letters": _letters,
    "indented": _indented,
}


@pytest.mark.parametrize("kinds", [("bytes", "bytes_other"), ("bos", "metaspace"), ("bytes",) * 2])
@pytest.mark.parametrize("name", TIGHT)
def test_a_text_without_spaces_becomes_items(name: str, kinds: tuple[str, str]) -> None:
    pair = [tiny("llama", tokenizer=kind) for kind in kinds]
    text = TIGHT[name](random.Random(f"{name} {kinds}"))
    items, excluded = make_items([RawItem("a", "a", {"text": text})], pair[0], pair[1])
    assert [item.id for item in items] == ["a", "a+1"], excluded
    task, at = Continuation(), 0
    whole_characters = {match.end() for match in regex.finditer(r"\X", text)}
    for item in items:
        prompt, answer = item.prompt, item.answers[0]
        at = text.index(prompt + answer, at) + len(prompt + answer)
        for place in (at - len(answer), at):
            assert place in whole_characters, "never within what is read as one character"
        for model in pair:
            before = model.encode(prompt)
            whole = model.encode(prompt + answer)
            assert torch.equal(whole.ids[: len(before)], before.ids), "a token ends with the prompt"
        tokens = len(pair[1].encode(prompt))
        assert task.context / 2 <= tokens <= task.context + 1
        assert len(pair[1].encode(answer)) >= task.continuation / 3
    if " " not in text:
        assert text.startswith("".join(item.prompt + item.answers[0] for item in items))


def _by_character(text: str) -> Encoding:
    """A token a character; a space is another token at the end of a text than within it."""
    ids = [ord(character) for character in text]
    if text.endswith(" "):
        ids[-1] = 0
    spans = [(index, index + 1) for index in range(len(text))]
    return Encoding(torch.tensor(ids), torch.tensor(spans))


def test_a_boundary_is_one_for_what_follows_too() -> None:
    """A token that ends at a place in the whole text need not end the text up to there."""
    model: Any = SimpleNamespace(encode=_by_character)
    text = "ab; ;cd"
    assert list(shared_ends(text, 5, 2, [model])) == [5, 4, 3, 2]
    assert shared_boundary(text, 5, 2, len(text), [model]) == 5
    assert shared_boundary(text, 4, 2, len(text), [model]) == 3
    assert shared_boundary(text, 4, 4, len(text), [model]) is None


@pytest.mark.parametrize("kind", ["wordpiece"])
def test_a_text_that_is_one_token_is_left_out_with_the_reason(kind: str) -> None:
    model = tiny("llama", tokenizer=kind)
    text = "x" * 5000
    _, excluded = make_items([RawItem("a", "a", {"text": text})], model, model)
    assert "a continuation item needs 241" in excluded[0].reason


END = "The key is with Tom. Who has it?"
JOINS = {
    "space": (END + " ", "Tom"),
    "two spaces": (END + "  ", "Tom"),
    "space on both sides": (END + " ", " Tom"),
    "line end": (END + "\n", "Tom"),
    "line end and space": (END + "\n ", "Tom"),
    "tab": (END + "\t", "Tom"),
    "in a word": ("The key is with To", "m"),
    "chinese": ("钥匙在谁那里？答：", "汤姆"),
    "digits": ("It was in 20", "21"),
}


@pytest.mark.parametrize("kind", [k for k in TOKENIZERS if k != "wordpiece"])
@pytest.mark.parametrize("join", JOINS)
def test_a_prompt_keeps_its_end_and_the_answer_follows_it(kind: str, join: str) -> None:
    model = tiny("llama", tokenizer=kind)
    prompt, answer = JOINS[join]
    before, ids = model.encode(prompt), following_ids(model, prompt, answer)
    whole = joined_ids(model, before, prompt + answer)
    assert whole is None or torch.equal(ids, whole), "as in the whole text where a token ends there"
    text, _ = model.encode_ids(torch.cat((before.ids, ids)))
    assert text.endswith(prompt + answer)


def test_what_no_tokens_spell_is_refused() -> None:
    """WordPiece writes no spaces but between words: nothing follows a space."""
    model = tiny("llama", tokenizer="wordpiece")
    with pytest.raises(EvalError, match="no token ends where the prompt does"):
        following_ids(model, "Nobody knew th", "e key")


def test_rows_whose_prompt_ends_in_a_space_are_scored(tmp_path: Path) -> None:
    tails = (" Who? ", "\n\nWho?  ", "\nQ: who?\nA:\t")
    raws = [
        RawItem(f"r{i}", f"d{i}", {"context": text, "question": tail, **answer})
        for i, (text, tail) in enumerate(zip(random_texts(3, 500), tails, strict=True))
        for answer in [{"answer": "Tom", "options": ["Tom", "Ann"]} if i else {"answers": ["Tom"]}]
    ]
    items, excluded = make_items(raws, sender(), receiver())
    assert not excluded
    assert [i.prompt for i in items] == [r.body["context"] + r.body["question"] for r in raws]
    evaluate(setup(), items, tmp_path, config=RunConfig(conditions=("native", "sender")))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert {row["status"] for row in rows} == {"ok"}, [row["reason"] for row in rows]


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ({"answer": "x"}, ("x",)),
        ({"answers": ["x", "y"]}, ("x", "y")),
        ({"answers": "x"}, ("x",)),
        ({"answers": {"text": ["x", "y"], "answer_start": [3, 9]}}, ("x", "y")),
        ({"answers": {"text": "x", "answer_start": 3}}, ("x",)),
        ({"answers": [{"text": "x", "answer_start": 3}, {"text": "y"}]}, ("x", "y")),
        ({"answer": {"text": ["x"], "answer_start": [3]}}, ("x",)),
    ],
)
def test_answers(given: dict[str, Any], accepted: tuple[str, ...]) -> None:
    raw = RawItem("a", "a", {"context": "c ", "question": " q\n", **given})
    assert kind_of(raw.body) in ("qa", "recall")
    assert prompt_and_answers(raw) == ("c  q\n", accepted)
    items, excluded = make_items([raw], sender(), receiver())
    assert not excluded
    assert items[0].answers == accepted


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"answers": {"text": [], "answer_start": []}}, "non-empty answer"),
        ({"answer": 7}, r"answer as text, found 7 \(int\)"),
        ({"answers": ["x", True]}, r"answer as text, found True \(bool\)"),
        ({"answers": {"text": [1e5]}}, r"answer as text, found 100000.0 \(float\)"),
        ({"answer": ""}, "non-empty answer"),
    ],
)
def test_answers_that_are_none(given: dict[str, Any], words: str) -> None:
    with pytest.raises(EvalError, match=words):
        prompt_and_answers(RawItem("a", "a", {"context": "c", **given}))


def test_a_row_of_no_kind_is_left_out_and_said(tmp_path: Path) -> None:
    texts = random_texts(3, 900)
    raws = [RawItem(f"r{i}", f"d{i}", {"text": text}) for i, text in enumerate(texts)]
    odd = RawItem("odd", "odd", {"words": "x", "text": None})
    items, excluded = make_items([raws[0], odd, *raws[1:]], sender(), receiver())
    assert {item.document for item in items} == {"d0", "d1", "d2"}
    assert [lost.id for lost in excluded] == ["odd"]
    assert "expected a row with text" in excluded[0].reason
    evaluate(
        setup(), items[:2], tmp_path, config=RunConfig(conditions=("native",)), excluded=excluded
    )
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows if row["item"] == "odd"] == ["excluded"]
    with pytest.raises(EvalError, match="expected a row with text"):
        make_items([odd], sender(), receiver())


def test_no_items_says_the_commonest_reasons(tmp_path: Path) -> None:
    raws = [RawItem(f"s{i}", f"s{i}", {"text": "short " * i}) for i in range(1, 8)]
    raws += [RawItem(f"q{i}", "q", {"prompt": f"q{i}", "answer": i}) for i in range(4)]
    raws += [RawItem("o", "o", {"prompt": "q", "options": ["a"], "label": 0})]
    raws += [RawItem("n", "n", {"text": "x", "chance": 3})]
    items, excluded = make_items(raws, sender(), receiver())
    assert not items
    with pytest.raises(EvalError) as refused:
        evaluate(setup(), items, tmp_path / "run", excluded=excluded)
    said = str(refused.value)
    assert "found 0 items; 13 rows were left out, 7: " in said
    assert "tokens, a continuation item needs 241 (s" in said
    assert "; 4: expected the answer as text, found 0 (int) (q0); 1: " in said
    assert said.endswith("; 1 for other reasons")
    assert not (tmp_path / "run").exists()
    assert commonest_reasons([]) == ""


def test_reasons_are_counted_by_what_they_say() -> None:
    lost = [Excluded(f"r{i}", "d", "qa", f"r{i}: {i}.5 of 'x{i}' is wrong") for i in range(9)]
    lost.append(Excluded("last", "d", "qa", "something else"))
    assert commonest_reasons(lost) == "9: 0.5 of 'x0' is wrong (r0); 1: something else (last)"


def test_a_bad_row_of_an_evaluation_is_left_out_and_named(tmp_path: Path) -> None:
    lines = [json.dumps({"id": f"r{i}", "text": "words"}) for i in range(300)]
    lines[100:103] = ["5", '{"text": "cut', '{"id": "r3", "text": "again"}']
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines), "utf-8")
    said: list[str] = []
    assert len(list(read_raw(str(path), Skipped(said.append)))) == 297
    (line,) = said
    assert line.startswith("3 of 300 rows left out: rows.jsonl line 101: expected an object")
    assert "line 102: cannot be read as json" in line
    assert "line 103: item id 'r3' stands twice" in line
    path.write_text("\n".join(lines[100:120]), "utf-8")
    assert len(list(read_raw(str(path)))) == 18
    path.write_text("\n".join(lines[100:104]), "utf-8")
    with pytest.raises(DataError, match="too many"):
        list(read_raw(str(path)))


def test_the_longest_text_is_not_tokenised_whole() -> None:
    text = demo.texts("test").read_text("utf-8") * 3
    with pytest.raises(EvalError, match="more tokens than the"):
        make_items_of_one({"prompt": text, "answer": " x"})
    assert make_items_of_one({"text": text}) == 2


def make_items_of_one(body: dict[str, Any]) -> int:
    items, excluded = make_items([RawItem("a", "a", body)], sender(), receiver())
    if excluded:
        raise EvalError(excluded[0].reason)
    return len(items)
