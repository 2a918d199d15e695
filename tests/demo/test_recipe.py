"""The recipe: a run that is cut and resumed equals one that is not, and rows are what they say."""

from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from kvbridge.demo import path
from recipes.demo import recipe
from recipes.demo.documents import RECALL_WEIGHT, Rows, compose, drill, encode, text_of
from recipes.demo.export import export
from recipes.demo.train import Run, Settings

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
}
POOL = [
    f"It was the {word} day of the visit, and nobody spoke of it."
    for word in ("first", "second", "third")
] * 20
SETTINGS = Settings("sender", steps=12, batch_tokens=512, rate=3e-3, seed=3)


def rows() -> Rows:
    return Rows(Tokenizer.from_file(str(path("receiver") / "tokenizer.json")), [POOL], seed=3)


def run(out: Path, settings: Settings = SETTINGS) -> Run:
    return Run(recipe.build("sender", 3, **TINY), rows(), settings, out)


def test_cut_and_resumed_equals_uncut_bit_for_bit(tmp_path: Path) -> None:
    uncut = run(tmp_path / "uncut")
    uncut.train()
    run(tmp_path / "cut").train(until=7)
    torch.manual_seed(99)  # a new process has another generator state
    resumed = run(tmp_path / "cut")
    assert resumed.step == 7
    resumed.train()
    for name, weights in uncut.model.state_dict().items():
        assert torch.equal(weights, resumed.model.state_dict()[name]), name


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    one = run(tmp_path / "one")
    one.train(until=2)
    other = run(tmp_path / "other")
    other.rows = Rows(other.rows.tokenizer, [POOL], seed=4)
    other.train(until=2)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True)
    )


def test_only_the_upper_third_moves_when_the_rest_is_frozen(tmp_path: Path) -> None:
    model = recipe.build("sender", 3, **TINY)
    before = {name: weights.clone() for name, weights in model.state_dict().items()}
    recipe.freeze_all_but(model, recipe.upper_third(3))
    Run(model, rows(), replace(SETTINGS, steps=3), tmp_path).train()
    moved = {
        name
        for name, weights in model.state_dict().items()
        if not torch.equal(weights, before[name])
    }
    assert moved
    assert all(name.startswith("model.layers.2.") for name in moved)


def test_rows_are_a_function_of_seed_step_and_index() -> None:
    shares = (0.4, 0.3, 0.1)
    assert rows().row(5, 1, 128, shares, 0.5) == rows().row(5, 1, 128, shares, 0.5)
    assert rows().row(5, 1, 128, shares, 0.5) != rows().row(6, 1, 128, shares, 0.5)
    ids, weights = rows().row(5, 1, 128, shares, 0.5)
    assert len(ids) == len(weights) == 129


def test_drills_weigh_exactly_the_tokens_that_were_told_before() -> None:
    tokenizer = rows().tokenizer
    pieces = drill(Random(1), 5)
    ids, weights = encode(tokenizer, pieces)
    marked = [
        tokenizer.decode([token])
        for token, weight in zip(ids, weights, strict=True)
        if weight == RECALL_WEIGHT
    ]
    assert marked == [piece.text for piece in pieces if piece.recallable]
    assert all(text_of(pieces).count(word) >= 2 for word in marked)


def test_a_document_mixes_prose_facts_and_answers() -> None:
    pieces, start = compose(Random(2), POOL, 0, 1200)
    assert start > 0
    assert sum(piece.recallable for piece in pieces) >= 4
    assert 1000 < len(text_of(pieces)) < 2600


def test_export_rounds_to_bf16_and_loads_again(tmp_path: Path) -> None:
    model = recipe.build("sender", 3, **TINY)
    export(model, tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model", dtype=torch.float32)
    for name, weights in model.state_dict().items():
        assert torch.equal(weights.bfloat16().float(), loaded.state_dict()[name]), name
    assert (tmp_path / "model" / "tokenizer.json").exists()
