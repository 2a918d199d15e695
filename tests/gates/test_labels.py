"""Outcomes against a plain greedy loop, and every label on outcomes of which the answer is
known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvbridge
from kvbridge.gates.calibrate.passing import Sample, prompts_of, watch
from kvbridge.gates.labels import LABELS
from kvbridge.gates.labels.continuing import Continuing
from kvbridge.gates.labels.outcomes import GREEDY, Outcome, Pending, compare
from tests.gates.conftest import PLAN

FINE = Outcome(False, GREEDY, 0.0, 0.0, True, True)
DAMAGE = {
    "next_token": replace(FINE, flip=True, diverges=0),
    "continuation": replace(FINE, diverges=2),
    "lost_answer": replace(FINE, translated_right=False),
    "loss_gap": replace(FINE, gap=0.5),
    "kl": replace(FINE, kl=0.5),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_tell_damage_from_none(name):
    label = LABELS[name]
    tau = label.default or 0.0
    assert label.damaged(FINE, tau) is False
    assert label.damaged(DAMAGE[name], tau) is True
    assert label.about
    assert all(LABELS[n].damaged(DAMAGE[n], LABELS[n].default or 0.0) for n in LABELS), (
        "one case per label"
    )


def test_labels_say_nothing_where_nothing_is_known():
    unknown = Outcome(True, 0, 1.0)
    assert LABELS["lost_answer"].damaged(unknown, 0) is None
    assert LABELS["loss_gap"].damaged(unknown, 0.1) is None
    assert (
        LABELS["lost_answer"].damaged(replace(FINE, native_right=False, translated_right=False), 0)
        is False
    )


@pytest.mark.parametrize("name", ["kl", "loss_gap", "continuation"])
def test_nan_is_damage(name):
    field = {"kl": "kl", "loss_gap": "gap", "continuation": "diverges"}[name]
    assert (
        LABELS[name].damaged(replace(FINE, **{field: float("nan")}), LABELS[name].default) is True
    )


def test_a_cache_of_nan_is_damaged_under_every_label(pair):
    ids = pair.receiver.encode(pair.texts[0]).ids
    native = kvbridge.capture(pair.receiver, input_ids=ids[:60]).layers
    bad = [{n: torch.full_like(t, float("nan")) for n, t in x.items()} for x in native]
    logs = Continuing(pair.receiver, [native]).greedy(ids[None, 60:61], 1)
    answer = logs[0][0]
    zero = torch.zeros(1, dtype=torch.int64)
    outcome, wrong = compare(
        pair.receiver,
        [
            Pending(int(ids[60]), native, bad, answer, True),
            Pending(int(ids[60]), bad, bad, zero, True),
        ],
    )
    assert outcome.native_right
    assert not outcome.translated_right
    assert all(label.damaged(outcome, label.default or 0.0) for label in LABELS.values())
    assert wrong.flip, "argmax over NaN is token 0 on both sides"
    assert not wrong.translated_right


def greedy(model, ids, count):
    chosen = []
    with torch.no_grad():
        for _ in range(count):
            chosen.append(
                int(
                    model.model(torch.cat((ids, torch.tensor(chosen, dtype=torch.int64)))[None])
                    .logits[0, -1]
                    .argmax()
                )
            )
    return chosen


def test_the_receivers_own_cache_is_never_damaged_and_unequal_lengths_go_together(pair):
    requests = [
        r
        for i, text in enumerate(pair.texts[:3])
        for r in prompts_of(
            Sample(str(i), str(i), text, (60 + 30 * i, 190)), pair.sender, pair.receiver
        )
    ]
    assert len({len(r.native[0]["k"]) for r in requests}) > 2
    for outcome in compare(
        pair.receiver, [Pending(r.last, r.native, r.native, r.following) for r in requests]
    ):
        assert not outcome.flip
        assert outcome.diverges == GREEDY
        assert outcome.kl < 1e-5
        assert abs(outcome.gap) < 1e-5


def test_against_a_plain_loop(pair):
    """The translated continuation diverges where a plain greedy loop over the same cache does."""
    samples = [Sample(str(i), str(i), t, (150,)) for i, t in enumerate(pair.texts[:4])]
    for seen in watch(pair.bridge(), samples, PLAN):
        ids = pair.receiver.encode(seen.prompt.text).ids
        native = greedy(pair.receiver, ids, GREEDY)
        handoff = pair.bridge().handoff(seen.prompt.snapshot, seen.prompt.text, repair=PLAN)
        continued = handoff.generate(GREEDY, do_sample=False)[0, len(ids) :].tolist()
        same = next(
            (i for i, (a, b) in enumerate(zip(native, continued, strict=False)) if a != b), GREEDY
        )
        assert seen.outcome.diverges == same
        assert seen.outcome.flip == (same == 0)


def test_prefixes_are_what_a_capture_of_the_prompt_gives(pair):
    text = pair.texts[0]
    for request in prompts_of(Sample("a", "a", text, (80, 160)), pair.sender, pair.receiver):
        whole = kvbridge.capture(pair.sender, request.text)
        assert torch.equal(whole.token_ids, request.snapshot.token_ids)
        assert request.snapshot.text_digest == whole.text_digest
        for row, own in zip(request.snapshot.layers, whole.layers, strict=True):
            assert torch.allclose(row["k"], own["k"], atol=1e-4)
        assert len(request.native[0]["k"]) + 1 == len(pair.receiver.encode(request.text))


def test_an_answer_is_right_or_wrong(pair):
    text = pair.texts[0][:120]
    ids = pair.receiver.encode(text).ids
    answer = pair.receiver.tokenizer.decode(greedy(pair.receiver, ids, 1))
    seen = list(watch(pair.bridge(), [Sample("a", "a", text + answer, (120,), answer=True)], PLAN))
    if seen:
        assert seen[0].outcome.native_right in (True, False)
        assert seen[0].outcome.translated_right is not None
