"""A range of tokens: what the receiver has already is taken as it is, and the rest is handed
over."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbridge import Bridge, Evidence, RepairPlan, capture
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.errors import UsageError
from kvbridge.handoff import stages
from kvbridge.handoff.cost import handoff_parts
from tests.handoff.handoffs import assert_exact, biases, continued, identity, renamed
from tests.models import EXACT_KINDS, TEXT, tiny, tiny_causal, wrapped

KINDS = (*EXACT_KINDS, "mistral_sliding", "neox", "smollm3")
KNOWN = 25
FEATURES = ("none", "embeddings", "hidden:1", "hidden:2")


def bridged(kind: str = "llama", features: str = "none", wrong: float = 0.0) -> Bridge:
    """Identity maps from the same model under another contract, off by `wrong`."""
    receiver = tiny(kind)
    sender = renamed(receiver)
    translator = identity(sender, receiver, features)
    for bias in biases(translator):
        bias.add_(wrong)
    return Bridge(translator, sender=sender, receiver=receiver)


def known_of(bridge: Bridge, count: int = KNOWN) -> KVSnapshot:
    ids = bridge.receiver.encode(TEXT).ids
    return capture(bridge.receiver, input_ids=ids[:count])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("features", FEATURES)
def test_known_rows_are_taken_and_the_rest_is_the_whole_ranges(kind, features):
    """The whole-range handoff recomputes the same tokens, so that both suffixes see the same
    rows."""
    bridge = bridged(kind, features, wrong=0.5)
    snapshot, known = capture(bridge.sender, TEXT), known_of(bridge)
    plan = RepairPlan(sinks=4, tail=9, layers=2, tokens=(40, 41))
    handoff = bridge.handoff(snapshot, TEXT, repair=plan, known=known)
    assert handoff.decision.reason == "ungated"
    whole = bridge.handoff(snapshot, TEXT, repair=replace(plan, sinks=KNOWN))
    for layer, (own, expected) in enumerate(zip(handoff.layers, whole.layers, strict=True)):
        for name, tensor in own.items():
            assert torch.equal(tensor[:KNOWN], known.layers[layer][name]), (layer, name)
            torch.testing.assert_close(tensor, expected[name], atol=1e-3, rtol=1e-3)
    assert handoff.provenance == whole.provenance
    for layer in range(4):
        assert handoff.provenance.at(layer, KNOWN - 1) == "exact"
    assert handoff.provenance.at(3, KNOWN) == "approximate"
    assert handoff.provenance.at(1, KNOWN) == "exact"
    assert handoff.provenance.at(3, 40) == "repaired"


@pytest.mark.parametrize("kind", KINDS)
def test_a_true_map_after_known_rows_is_the_receivers_own(kind):
    bridge = bridged(kind, "embeddings")
    handoff = bridge.handoff(capture(bridge.sender, TEXT), TEXT, known=known_of(bridge))
    assert_exact(handoff, continued(bridge.receiver, handoff.ids))


def test_costs_count_the_rest():
    bridge = bridged("llama", "hidden:1")
    snapshot, known = capture(bridge.sender, TEXT), known_of(bridge)
    plan = RepairPlan(sinks=4, tail=9)
    (done,) = stages.repair(
        bridge.pair, bridge.prepare([bridge.request(snapshot, TEXT, repair=plan, known=known)])
    )
    tokens, flops = len(done.encoding), bridge.translator.flops()
    expected = handoff_parts(
        bridge.receiver.geometry,
        tokens,
        translator_flops=flops,
        translated=tokens - 1 - KNOWN - 8,
        first_layers=1,
        recomputed=8,
        known=KNOWN,
    )
    assert Evidence(bridge.pair, done).parts == expected
    assert done.aligned.chosen.tolist() == list(range(tokens - 9, tokens - 1)), "no sinks"
    assert done.features.hidden.shape == (tokens - 1 - KNOWN, 48)
    all_of_it = bridge.handoff(snapshot, TEXT, repair=plan).decision.predicted_flops
    assert sum(expected.values()) < all_of_it


@pytest.mark.parametrize("features", FEATURES)
def test_evidence_of_a_range_is_over_all_tokens(features):
    bridge = bridged("llama", features)
    snapshot, known = capture(bridge.sender, TEXT), known_of(bridge)
    request = replace(bridge.request(snapshot, TEXT, known=known), observed=True)
    (done,) = stages.repair(bridge.pair, bridge.prepare([request]))
    evidence = Evidence(bridge.pair, done)
    assert evidence.start == KNOWN
    assert evidence.alignment.covered.tolist() == [t >= KNOWN for t in range(done.cached)]
    assert done.rows.tolist() == list(range(KNOWN, done.cached))
    if features != "none":
        assert evidence.features.shape == (done.cached, 48)
        assert torch.equal(evidence.features[KNOWN:], done.features.hidden)


def test_a_batch_of_ranges_equals_one_by_one():
    bridge = bridged("llama", "hidden:1", wrong=0.5)
    snapshot = capture(bridge.sender, TEXT)
    known = (None, known_of(bridge, 10), known_of(bridge, 40))
    requests = [bridge.request(snapshot, TEXT, known=one) for one in known]
    together = bridge.finish(bridge.prepare(requests))
    for one, handoff in zip(known, together, strict=True):
        alone = bridge.handoff(snapshot, TEXT, known=one)
        assert alone.provenance == handoff.provenance
        assert alone.decision == handoff.decision
        for a, b in zip(alone.layers, handoff.layers, strict=True):
            assert all(torch.allclose(a[n], b[n], atol=1e-5) for n in a)


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("asset", [True, False])
def test_a_prompt_that_is_known_whole_is_exact(beyond, asset):
    """With the last token or without, which gets no cache entry; nothing needs a translator."""
    bridge = bridged(wrong=0.5)
    if not asset:
        bridge = Bridge(None, sender=bridge.sender, receiver=bridge.receiver)
    cached = len(bridge.receiver.encode(TEXT)) - 1
    known = known_of(bridge, cached + beyond)
    handoff = bridge.handoff(capture(bridge.sender, TEXT), TEXT, known=known)
    assert (handoff.decision.verdict, handoff.decision.reason) == ("use", "exact")
    assert handoff.provenance.fidelity == "exact"
    for own, expected in zip(handoff.layers, known.layers, strict=True):
        assert all(torch.equal(own[n], expected[n][:cached]) for n in own)
    assert_exact(handoff, continued(bridge.receiver, handoff.ids))


def test_what_is_known_whole_is_exact_whatever_the_senders_shape():
    """A sender with other heads and fewer layers has no row that anything reads."""
    receiver, sender = tiny("llama"), tiny_causal("llama", 1, num_hidden_layers=2, head_dim=8)
    bridge = Bridge(None, sender=wrapped(sender, name="small"), receiver=receiver)
    known = known_of(bridge, len(receiver.encode(TEXT)) - 1)
    handoff = bridge.handoff(capture(bridge.sender, TEXT), TEXT, known=known)
    assert (handoff.decision.verdict, handoff.decision.reason) == ("use", "exact")
    assert_exact(handoff, continued(receiver, handoff.ids))


def test_shared_layers_after_known_rows():
    model = tiny("llama")
    bridge = Bridge(None, sender=model, receiver=model)
    snapshot, known = capture(model, TEXT), known_of(bridge)
    marked = replace(known, layers=tuple({n: t + 1 for n, t in x.items()} for x in known.layers))
    handoff = bridge.handoff(snapshot, TEXT, known=marked)
    assert handoff.decision.reason == "exact"
    for layer, own in enumerate(handoff.layers):
        for name, tensor in own.items():
            assert torch.equal(tensor[:KNOWN], marked.layers[layer][name])
            expected = snapshot.layers[layer][name][KNOWN : handoff.cached]
            assert torch.equal(tensor[KNOWN:], expected)


def test_across_tokenizers():
    receiver = tiny("llama")
    sender = tiny("llama", 1, "bytes_other")
    bridge = Bridge(identity(sender, receiver), sender=sender, receiver=receiver)
    snapshot, known = capture(sender, TEXT), known_of(bridge)
    handoff = bridge.handoff(snapshot, TEXT, known=known)
    assert handoff.decision.reason == "ungated"
    whole = bridge.handoff(snapshot, TEXT, repair=RepairPlan(sinks=KNOWN))
    for own, expected in zip(handoff.layers, whole.layers, strict=True):
        for name in own:
            torch.testing.assert_close(own[name], expected[name], atol=1e-3, rtol=1e-3)


def test_what_is_not_the_receivers_own_beginning_is_refused():
    bridge = bridged(wrong=0.5)
    receiver, snapshot = bridge.receiver, capture(bridge.sender, TEXT)
    ids = receiver.encode(TEXT).ids
    translated = bridge.handoff(snapshot, TEXT).snapshot()
    refused = {
        "another model": (capture(tiny("llama", 1), TEXT[:60]), "contract_mismatch"),
        "the sender": (capture(bridge.sender, TEXT[:60]), "contract_mismatch"),
        "translated": (translated, "lineage"),
        "other ids": (capture(receiver, input_ids=ids[1:20]), "text_mismatch"),
        "more": (capture(receiver, TEXT + " And more."), "text_mismatch"),
        "holes": (
            capture(receiver, input_ids=ids[:20]).select(torch.tensor([0, 1, 5])),
            "text_mismatch",
        ),
    }
    for name, (known, reason) in refused.items():
        decision = bridge.handoff(snapshot, TEXT, known=known).decision
        assert (decision.verdict, decision.reason) == ("discard", reason), name
        assert "known" in decision.detail
    with pytest.raises(UsageError, match="known="):
        bridge.handoff(snapshot, TEXT, known=TEXT)


def test_a_rest_that_would_be_recomputed_whole_is_too_short():
    bridge = bridged()
    cached = len(bridge.receiver.encode(TEXT)) - 1
    snapshot, known = capture(bridge.sender, TEXT), known_of(bridge, cached - 3)
    decision = bridge.handoff(snapshot, TEXT, repair=RepairPlan(tail=4), known=known).decision
    assert decision.reason == "too_short"
    assert bridge.handoff(snapshot, TEXT, known=known).decision.accepted
