"""What ships in kvbridge/demo keeps its promises: sizes, splits, answers where they are said to be,
frozen layers."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from kvbridge.demo import MODELS, TEXTS, path, texts
from recipes.demo import corpus, measure, recipe
from recipes.demo.tasks import KINDS, VOCABULARY


@cache
def rows(split: str) -> list[dict[str, Any]]:
    with texts(split).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(path("receiver") / "tokenizer.json"))


def test_unknown_names_raise() -> None:
    with pytest.raises(KeyError, match="sender"):
        path("nobody")
    with pytest.raises(KeyError, match="validation"):
        texts("nothing")


@pytest.mark.parametrize(
    ("split", "least"), [("train", 600), ("validation", 150), ("test", 300), ("recall", 1000)]
)
def test_counts_and_unique_ids(split: str, least: int) -> None:
    assert len(rows(split)) >= least
    assert len({row["id"] for row in rows(split)}) == len(rows(split))


def test_splits_share_no_document_and_none_was_trained_on() -> None:
    owner: dict[str, str] = {}
    for split in ("train", "validation", "test", "recall"):
        for row in rows(split):
            assert owner.setdefault(row["document"], split) == split
            assert corpus.split_of(row["document"]) == split != "base"


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_texts_are_long_enough(split: str) -> None:
    assert min(len(tokenizer().encode(row["text"]).ids) for row in rows(split)) >= 320


def test_texts_stay_small() -> None:
    assert sum(texts(split).stat().st_size for split in TEXTS) < 4_000_000


def test_recall_answers_stand_once_in_the_context_at_the_stated_distance() -> None:
    for item in rows("recall"):
        ids = tokenizer().encode(item["context"] + item["question"] + item["answer"]).ids
        prompt = tokenizer().encode(item["context"] + item["question"]).ids
        assert ids[:-1] == prompt
        assert [len(prompt) - i for i, token in enumerate(prompt) if token == ids[-1]] == [
            item["distance"]
        ]
        assert 20 <= item["distance"] <= 180


def test_recall_options_are_values_of_the_relation_told_in_the_context() -> None:
    for item in rows("recall"):
        assert item["answer"] in item["options"]
        assert len(set(item["options"])) == len(item["options"]) == 4
        assert set(item["options"]) <= set(KINDS[item["kind"]].values)
        assert all(option in item["context"] for option in item["options"])


def test_every_task_word_is_one_token() -> None:
    assert all(
        len(tokenizer().encode(word, add_special_tokens=False).ids) == 1 for word in VOCABULARY
    )


def test_models_share_one_tokenizer() -> None:
    assert len({(path(name) / "tokenizer.json").read_bytes() for name in MODELS}) == 1


def test_weights_stay_under_25_megabytes_and_are_bf16() -> None:
    files = [path(name) / "model.safetensors" for name in MODELS]
    assert sum(file.stat().st_size for file in files) <= 25_000_000
    assert all(
        tensor.dtype is torch.bfloat16 for file in files for tensor in load_file(file).values()
    )


def test_sender_and_receiver_differ_in_every_dimension() -> None:
    sender, receiver = (
        json.loads((path(name) / "config.json").read_text()) for name in ("sender", "receiver")
    )
    for entry in ("num_hidden_layers", "hidden_size", "num_key_value_heads", "head_dim"):
        assert sender[entry] != receiver[entry]


def test_tuned_differs_from_receiver_in_its_upper_third_alone() -> None:
    receiver, tuned = (
        load_file(path(name) / "model.safetensors") for name in ("receiver", "tuned")
    )
    layers = json.loads((path("receiver") / "config.json").read_text())["num_hidden_layers"]
    upper = tuple(f"model.layers.{index}." for index in recipe.upper_third(layers))
    assert receiver.keys() == tuned.keys()
    changed = {key for key in tuned if not torch.equal(tuned[key], receiver[key])}
    assert changed
    assert all(key.startswith(upper) for key in changed)


def test_chat_template_renders_and_marks_the_turn() -> None:
    from transformers import AutoTokenizer

    wrapped = AutoTokenizer.from_pretrained(path("receiver"))
    shown = wrapped.apply_chat_template(
        [{"role": "user", "content": "Where is Emma?"}], tokenize=False, add_generation_prompt=True
    )
    assert shown == "<bos>user: Where is Emma?\nassistant:"


def test_receiver_uses_its_context() -> None:
    torch.manual_seed(0)
    model = measure.load("receiver")
    sample = rows("recall")[::30]
    seen = measure.recall(model, tokenizer(), sample)
    blind = measure.recall(model, tokenizer(), sample, context=False)
    assert sum(seen) / len(sample) > 5 * max(sum(blind) / len(sample), 0.04)
    gain = measure.losses(model, tokenizer(), "test", 0, 24) - measure.losses(
        model, tokenizer(), "test", 192, 24
    )
    assert gain > 0.3


def test_demo_paths_do_not_import_torch() -> None:
    import subprocess
    import sys

    root = Path(__file__).parents[2]
    code = "import kvbridge.demo, sys; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
