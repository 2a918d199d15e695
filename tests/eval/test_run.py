"""Tasks, conditions and runs on tiny models: figures against plain forwards, cuts, and inputs that
cannot be used."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import kvbridge
from kvbridge.errors import DataError, EvalError
from kvbridge.eval.conditions.names import condition, defaults, known_names
from kvbridge.eval.conditions.prompt import Prompt
from kvbridge.eval.conditions.setup import Setup
from kvbridge.eval.pair import Fitted, run_pair
from kvbridge.eval.report.finish import finish
from kvbridge.eval.run.config import RunConfig
from kvbridge.eval.run.evaluate import evaluate
from kvbridge.eval.run.latency import Latency, break_even, measure_latency
from kvbridge.eval.tasks import TASKS
from kvbridge.eval.tasks.base import Scored, compare
from kvbridge.eval.tasks.chosen import make_items
from kvbridge.eval.tasks.continuation import Continuation
from kvbridge.eval.tasks.items import Item, RawItem, read_raw
from kvbridge.eval.tasks.qa import f1, normalise
from tests.fitting.pairs import fitted, receiver, sender
from tests.models import TEXT, random_texts


@cache
def setup() -> Setup:
    fit = fitted(receiver_features="embeddings")
    assert fit.controls is not None
    return Setup.of(fit.translator, fit.controls, sender(), receiver())


def question(number: int, **changes: Any) -> RawItem:
    texts = random_texts(6, 150)
    body = {"context": texts[number % 6] + " ", "question": "And then", "answer": " the", **changes}
    return RawItem(f"q{number}", f"d{number % 6}", body)


@cache
def items() -> list[Item]:
    texts = [
        RawItem(f"t{i}", f"d{i}", {"text": text}) for i, text in enumerate(random_texts(4, 900))
    ]
    small = Continuation(context=24, continuation=6)
    return [item for raw in texts for item in small.items(raw, receiver())] + [
        item for i in range(4) for item in TASKS["recall"].items(question(i), receiver())
    ]


@torch.no_grad()
def native_nats(prompt: str, answer: str) -> float:
    """The receiver's loss on the answer by one plain forward."""
    model = receiver()
    ids, count = model.encode(prompt + answer).ids, len(model.encode(prompt))
    logs = model.model(ids[None]).logits[0].float().log_softmax(-1)
    return -float(sum(logs[i - 1, ids[i]] for i in range(count, len(ids))))


@pytest.mark.parametrize("name", sorted(known_names()))
def test_every_condition_scores_every_item_or_says_why(name: str) -> None:
    for item in (items()[0], items()[-1]):
        prompt = Prompt(setup(), item, random_texts(1, 2000)[0])
        if name.startswith(("raw_sender", "gated")):
            with pytest.raises(EvalError, match="needs"):
                condition(name)(prompt)
            continue
        start = condition(name)(prompt)
        scored = TASKS[item.task].score(item, start)
        again = TASKS[item.task].score(item, start)
        assert scored.loss is not None
        assert scored.loss > 0
        assert scored.loss == again.loss, "scoring modified the start"
        assert start.prefill_share > 0
        assert start.position == len(start.model.encode(item.prompt))


def test_native_loss_is_that_of_one_plain_forward() -> None:
    for item in items():
        start = condition("native")(Prompt(setup(), item, ""))
        scored = TASKS[item.task].score(item, start)
        assert scored.loss == pytest.approx(native_nats(item.prompt, item.answers[0]), abs=1e-4)


def test_tail_only_is_a_forward_of_sinks_and_tail_at_their_own_positions() -> None:
    raw = RawItem("long", "d", {"text": random_texts(1, 900)[0]})
    (item, *_) = Continuation(context=60, continuation=6).items(raw, receiver())
    start = condition("tail_only32")(Prompt(setup(), item, ""))
    ids, count = receiver().encode(item.prompt).ids, len(receiver().encode(item.prompt))
    kept = [i for i in range(count) if i < 4 or i >= count - 32]
    assert len(kept) == 36
    mask = torch.ones((1, len(kept)), dtype=torch.int64)
    plain = (
        receiver()
        .model(ids[kept][None], position_ids=torch.tensor([kept]), attention_mask=mask)
        .logits[0, -1]
    )
    assert torch.allclose(start.logits, plain.float(), atol=1e-4)


def test_wrong_document_differs_from_translated_only_in_the_senders_content() -> None:
    prompt = Prompt(setup(), items()[0], TEXT * 4)
    right, wrong = prompt.snapshot, prompt.wrong_snapshot
    assert torch.equal(right.token_ids, wrong.token_ids)
    assert right.text_digest == wrong.text_digest
    assert not torch.equal(right.layers[0]["v"], wrong.layers[0]["v"])


def test_a_cut_run_writes_every_row_once_and_the_summary_follows_from_the_rows(
    tmp_path: Path,
) -> None:
    conditions = ("native", "sender", "translated", "no_context")
    seen = []

    def stop(done: int, total: int, task: str) -> None:
        seen.append(done)
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(setup(), items(), tmp_path, config=RunConfig(conditions=conditions, progress=stop))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    evaluate(setup(), items(), tmp_path, config=RunConfig(conditions=conditions))
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    keys = [(r["item"], r["condition"]) for r in rows]
    assert len(keys) == len(set(keys)) == len(items()) * len(conditions)
    dense = {r["item"]: r["flops"] for r in rows if r["condition"] == "native"}
    assert min(dense.values()) > 100_000
    assert all(
        r["flops"] == pytest.approx(r["prefill_share"] * dense[r["item"]], abs=1) for r in rows
    )
    assert finish(tmp_path)["counts"]["ok"] == len(keys)
    assert (tmp_path / "report.html").exists()


def test_rows_of_another_pair_are_refused(tmp_path: Path) -> None:
    evaluate(setup(), [items()[0], items()[-1]], tmp_path, config=RunConfig(conditions=("native",)))
    translator = setup().bridge.translator
    assert translator is not None
    other = Setup.of(translator, translator, sender(), receiver())
    object.__setattr__(other, "sender", receiver())
    with pytest.raises(EvalError, match="pair"):
        evaluate(
            other, [items()[0], items()[-1]], tmp_path, config=RunConfig(conditions=("native",))
        )


def test_items_beyond_a_models_positions_are_counted_out_and_the_rest_goes_on(
    tmp_path: Path,
) -> None:
    long = question(1, context=" ".join(random_texts(30, 200)))
    made, excluded = make_items([question(0), long, question(2)], sender(), receiver())
    assert [i.id for i in made] == ["q0", "q2"]
    assert [e.id for e in excluded] == ["q1"]
    assert "positions" in excluded[0].reason
    evaluate(
        setup(),
        made,
        tmp_path,
        config=RunConfig(conditions=("native", "translated")),
        excluded=excluded,
    )
    summary = finish(tmp_path)
    assert summary["counts"]["excluded"] == 2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"options": [" a", " b"], "label": 2}, "label from 0 to 1"),
        ({"options": [" a", " b"], "label": True}, "label from 0 to 1"),
        ({"options": [" a", " a"], "label": 0}, "different options"),
        ({"options": [" a"], "label": 0}, "two or more"),
        ({"task": "multiple_choice", "options": [" a", " b"], "answer": " c"}, "not among"),
        ({"answer": ""}, "non-empty answer"),
        ({"answers": []}, "text, or with context"),
        ({"text": "too short"}, "needs"),
        ({"text": "too short", "chance": 2}, "chance from 0 to 1"),
        ({"answer": " x", "chance": -0.1}, "chance from 0 to 1"),
        ({"answers": [" x"], "chance": 1.5}, "chance from 0 to 1"),
        ({"answers": [" x"], "chance": float("nan")}, "chance from 0 to 1"),
        ({"options": [" a", " b"], "label": 0, "chance": True}, "chance from 0 to 1"),
        ({"task": "none-such", "text": "x"}, "expected task"),
    ],
)
def test_bad_rows_are_refused_or_excluded_with_the_reason(body: dict[str, Any], says: str) -> None:
    context = {} if "text" in body else {"context": "Once upon a time"}
    raw = RawItem("bad", "d", {**context, **body})
    if body.get("answers") == [] or body.get("task") == "none-such":
        with pytest.raises(EvalError, match=says):
            make_items([raw], sender(), receiver())
        return
    _, excluded = make_items([raw], sender(), receiver())
    assert says in excluded[0].reason


def test_duplicate_ids_and_empty_files_are_refused(tmp_path: Path) -> None:
    twice = tmp_path / "twice.jsonl"
    twice.write_text('{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}\n', "utf-8")
    with pytest.raises(DataError, match="twice"):
        list(read_raw(str(twice)))
    (tmp_path / "empty.jsonl").write_text("", "utf-8")
    with pytest.raises(DataError, match="empty"):
        list(read_raw(str(tmp_path / "empty.jsonl")))


def test_one_document_is_no_evaluation(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="2 documents"):
        evaluate(setup(), items()[:1], tmp_path)
    with pytest.raises(EvalError, match="conditions"):
        evaluate(
            setup(),
            [items()[0], items()[-1]],
            tmp_path,
            config=RunConfig(conditions=("native", "none-such")),
        )


def test_multiple_choice_takes_the_likeliest_option_per_character() -> None:
    raw = question(0, answer=None, options=[" the", " zqx", " ship"], label=0)
    (item,) = TASKS["multiple_choice"].items(raw, receiver())
    start = condition("native")(Prompt(setup(), item, ""))
    per_character = {o: native_nats(item.prompt, o) / len(o) for o in item.options}
    assert TASKS["multiple_choice"].score(item, start).correct == int(
        min(per_character, key=per_character.__getitem__) == " the"
    )


def test_generated_answers_are_those_of_generate() -> None:
    raw = question(0, answer=None, answers=[" the"])
    (item,) = TASKS["qa"].items(raw, receiver())
    start = condition("native")(Prompt(setup(), item, ""))
    ids = receiver().encode(item.prompt).ids
    plain = (
        receiver()
        .model.generate(ids[None], max_new_tokens=7, do_sample=False)[0, len(ids) :]
        .tolist()
    )
    assert start.greedy(7) == plain


def test_squad_normalisation_and_f1() -> None:
    assert normalise("The  quick, Brown fox!") == "quick brown fox"
    assert f1("the brown fox", "A fox") == pytest.approx(2 * 1 / 3)
    assert f1("", "x") == 0


def test_kl_and_agreement_against_torch() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 9).log_softmax(-1), torch.randn(5, 9).log_softmax(-1)
    kl, agreement = compare(a, b)
    expected = torch.nn.functional.kl_div(b, a, log_target=True, reduction="batchmean")
    assert kl == pytest.approx(float(expected), abs=1e-6)
    assert agreement == pytest.approx(float((a.argmax(-1) == b.argmax(-1)).float().mean()))
    assert compare(a, a) == (0.0, 1.0)


def test_break_even_is_where_the_handoff_stays_faster() -> None:
    row = lambda tokens, ratio: Latency(tokens, 10.0, 10.0 * ratio, 0.1)  # noqa: E731
    assert break_even([row(64, 0.5), row(128, 0.75), row(256, 1.25)]) == 192
    assert break_even([row(64, 1.2), row(128, 1.5)]) == 64
    assert break_even([row(64, 1.2), row(128, 0.9), row(256, 1.1)]) == 192
    assert break_even([row(64, 0.5)]) is None
    assert break_even([]) is None


def test_latency_is_measured_at_lengths_that_fit() -> None:
    rows = measure_latency(setup().bridge, TEXT * 4, lengths=(16, 64, 100_000), repeats=1)
    assert [row.tokens for row in rows] == [16, 64]
    assert all(row.ratio > 0 for row in rows)


def test_an_asset_on_disk_is_evaluated_by_its_own_controls(tmp_path: Path) -> None:
    kvbridge.save_asset(fitted(receiver_features="embeddings"), tmp_path / "asset")
    asset = kvbridge.load_asset(tmp_path / "asset")
    summary = run_pair(
        sender(),
        receiver(),
        Fitted(asset, {"total_s": 1.0}),
        items(),
        tmp_path / "run",
        RunConfig(command="kvbridge eval run"),
    )
    assert set(summary["conditions"]) == set(defaults())
    assert summary["pair"]["translator_digest"] == asset.digest
    assert summary["timings"] == {"total_s": 1.0}


def test_kl_skips_what_native_excludes_and_never_hides_nan() -> None:
    native = torch.tensor([[1.0, 2.0, -torch.inf]]).log_softmax(-1)
    other = torch.tensor([[2.0, 1.0, -torch.inf]]).log_softmax(-1)
    expected = float((native.exp() * (native - other))[0, :2].sum())
    assert compare(native, other)[0] == pytest.approx(expected)
    assert math.isnan(compare(native, torch.full((1, 3), math.nan))[0])
    assert math.isnan(compare(torch.full((1, 3), math.nan), native)[0])
    assert compare(other.exp().log(), torch.tensor([[-torch.inf, 0.0, 0.0]]))[0] == math.inf


def test_a_choice_with_nan_for_an_option_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = question(0, answer=None, options=[" the", " zqx"], label=0)
    (item,) = TASKS["multiple_choice"].items(raw, receiver())
    losses = iter((1.0, math.nan))
    monkeypatch.setattr(
        "kvbridge.eval.tasks.multiple_choice.likelihood", lambda *_: Scored(next(losses), 1, 4)
    )
    start = condition("native")(Prompt(setup(), item, ""))
    assert math.isnan(TASKS["multiple_choice"].score(item, start).loss or 0.0)
