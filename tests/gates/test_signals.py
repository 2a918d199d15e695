"""Every registered signal: finite, its cost stated and counted, and a reaction to another document where it claims one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import kvbridge
from kvbridge import RepairPlan
from kvbridge.gates import reading as module
from kvbridge.gates.costs import KNOWN, PARTS
from kvbridge.gates.extras import Extras
from kvbridge.gates.reading import Inapplicable, Reading, head
from kvbridge.gates.signals import SIGNALS, parts_of
from kvbridge.snapshot import build_cache
from tests.gates.conftest import PLAN
from tests.models import EXACT_KINDS, TEXT, tiny

INTEGRITY = [name for name, s in SIGNALS.items() if s.integrity]


@torch.no_grad()
def read(reading, name):
    return SIGNALS[name].read(reading)


@pytest.mark.parametrize("name", SIGNALS)
def test_finite_named_and_paid_for(pair, name):
    reading = Reading(pair.evidence(), pair.extras)
    values = read(reading, name)
    assert len(values) == len(SIGNALS[name].columns)
    assert all(math.isfinite(v) and type(v) is float for v in values)
    assert set(reading.spent) == set(SIGNALS[name].parts), "what it costs is what it says"
    assert all(type(v) is int and v > 0 for v in reading.spent.values())
    assert SIGNALS[name].about


def test_columns_are_unique_and_parts_known():
    columns = [c for s in SIGNALS.values() for c in s.columns]
    assert len(set(columns)) == len(columns)
    assert all(p in PARTS for s in SIGNALS.values() for p in s.parts)


@pytest.mark.parametrize("name", SIGNALS)
def test_reading_twice_gives_the_same_and_modifies_nothing(pair, name):
    evidence = pair.evidence()
    before = [t.clone() for layers in (evidence.translated, evidence.repaired, evidence.snapshot.layers) for x in layers for t in x.values()]  # fmt: skip
    first = read(Reading(evidence, pair.extras), name)
    assert read(Reading(evidence, pair.extras), name) == first
    after = [t for layers in (evidence.translated, evidence.repaired, evidence.snapshot.layers) for x in layers for t in x.values()]  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["sender_first", "sender_tail"])
def test_a_check_of_the_snapshot_against_itself_tells_another_document_at_once(pair, name):
    (right,) = read(Reading(pair.evidence(), pair.extras), name)
    (wrong,) = read(Reading(pair.evidence(*pair.wrong()), pair.extras), name)
    assert right < -4
    assert wrong > -1.5


@pytest.mark.parametrize("name", ["tail_residual", "first_layers"])
def test_receiver_side_residuals_grow_with_another_document(pair, name):
    right = read(Reading(pair.evidence(), pair.extras), name)
    wrong = read(Reading(pair.evidence(*pair.wrong()), pair.extras), name)
    assert sum(wrong) > sum(right)


def test_leverage_grows_for_rows_of_no_corpus(pair):
    snapshot = kvbridge.capture(pair.sender, pair.texts[0])
    odd = replace(snapshot, layers=tuple({n: 5 * t for n, t in x.items()} for x in snapshot.layers))
    right = read(Reading(pair.evidence(), pair.extras), "leverage")
    wrong = read(Reading(pair.evidence(odd), pair.extras), "leverage")
    assert wrong[0] > right[0] + 2


def test_the_next_token_is_the_models_own(pair):
    """Logits under the repaired cache against a plain forward from the handoff."""
    text = pair.texts[0]
    handoff = pair.bridge().handoff(kvbridge.capture(pair.sender, text), text, repair=PLAN)
    with torch.no_grad():
        out = pair.receiver.model(
            input_ids=handoff.remaining_ids, past_key_values=handoff.cache, use_cache=True,
            attention_mask=torch.ones((1, len(handoff.ids)), dtype=torch.int64),
        )  # fmt: skip
    ours = Reading(pair.evidence(), pair.extras).next_logs
    assert torch.allclose(ours, out.logits[0, -1].float().log_softmax(-1), atol=1e-4)


def test_the_known_tail_is_predicted_as_by_a_plain_forward(pair):
    """The receiver fed with the known tail, from the repaired cache of what is before it."""
    evidence = pair.evidence()
    logs, following = Reading(evidence, pair.extras).receiver_tail_logs
    cached = len(evidence.ids) - 1
    first = cached - KNOWN
    cache = build_cache(pair.receiver, [{n: t[:first] for n, t in x.items()} for x in evidence.repaired])
    with torch.no_grad():
        out = pair.receiver.model(
            input_ids=evidence.ids[None, first:cached], past_key_values=cache, use_cache=True,
            attention_mask=torch.ones((1, cached), dtype=torch.int64),
        )  # fmt: skip
    assert torch.equal(following, evidence.ids[-KNOWN:])
    assert torch.allclose(logs, out.logits[0].float().log_softmax(-1), atol=1e-4)


@pytest.mark.parametrize("kind", [*EXACT_KINDS, "cohere"])
def test_the_head_gives_the_models_own_logits(kind):
    model = tiny(kind)
    ids = model.encode(TEXT).ids[None, :20]
    with torch.no_grad():
        states = model.decoder(input_ids=ids).last_hidden_state[0]
        expected = model.model(ids).logits[0].float().log_softmax(-1)
    assert torch.allclose(head(model, states), expected, atol=1e-4)


def test_what_cannot_be_read_says_so(pair):
    none = Extras()
    for name in ("leverage", "disagreement"):
        with pytest.raises(Inapplicable):
            read(Reading(pair.evidence(), none), name)
    with pytest.raises(Inapplicable, match="tail"):
        read(Reading(pair.evidence(plan=RepairPlan(tail=1)), pair.extras), "tail_residual")
    snapshot = kvbridge.capture(pair.sender, pair.texts[0])
    holes = snapshot.select(torch.tensor([i for i in range(len(snapshot)) if i != 9]))
    with pytest.raises(Inapplicable, match="holes"):
        read(Reading(pair.evidence(holes), pair.extras), "sender_tail")


@torch.no_grad()
def test_what_is_planned_goes_through_the_head_at_once(pair, monkeypatch):
    """The same numbers with one pass over the head's weights, each part counted as before, none for what has no tail."""
    calls = []
    real = module.head
    monkeypatch.setattr(module, "head", lambda model, states: calls.append(len(states)) or real(model, states))
    evidence = pair.evidence()
    apart, both = Reading(evidence, pair.extras), Reading(evidence, pair.extras, planned=parts_of(SIGNALS))
    for name in ("next_token", "tail_loss"):
        assert read(both, name) == pytest.approx(read(apart, name), abs=1e-4)
    assert sorted(calls) == [1, KNOWN, KNOWN + 1, KNOWN + 1, KNOWN + 1], "two of them are the sender's tail"
    assert both.spent == apart.spent
    short = Reading(pair.evidence(plan=RepairPlan(tail=1)), pair.extras, planned=parts_of(SIGNALS))
    assert all(map(math.isfinite, read(short, "next_token")))


@pytest.mark.parametrize(("name", "layer"), [("sender_first", 0), ("sender_tail", -1)])
def test_nan_in_a_cache_is_never_the_smaller_error(pair, name, layer):
    evidence = pair.evidence()
    layers = [dict(x) for x in evidence.snapshot.layers]
    layers[layer]["v"] = layers[layer]["v"].clone()
    layers[layer]["v"][-1] = float("nan")
    poisoned = replace(evidence, snapshot=replace(evidence.snapshot, layers=tuple(layers)))
    with torch.no_grad():
        assert math.isnan(SIGNALS[name].read(Reading(poisoned, pair.extras))[0])
