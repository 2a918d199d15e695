"""Layers that two models have in common are handed over as they are, and called exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbridge import Bridge, RepairPlan, capture
from kvbridge.geometry import shared_layers
from tests.handoff.handoffs import assert_exact, biases, continued, identity
from tests.models import TEXT, tiny, tiny_causal, wrapped


def tuned(kind="llama", layer=2):
    """The model of `tiny(kind)` with every layer from `layer` on, and its head, drawn anew."""
    model, other = tiny_causal(kind), tiny_causal(kind, seed=5)
    state = {
        n: p
        for n, p in other.state_dict().items()
        if any(f".{i}." in n for i in range(layer, 4)) or "lm_head" in n
    }
    model.load_state_dict(state, strict=False)
    return wrapped(model, name="tuned")


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("layer", [0, 1, 3, 4])
def test_count(kind, layer):
    base, other = tiny(kind), tuned(kind, layer)
    assert shared_layers(base.geometry, other.geometry) == layer
    assert shared_layers(other.geometry, base.geometry) == layer
    assert shared_layers(base.geometry, base.geometry) == 4


@pytest.mark.parametrize(
    "field",
    [
        "tokenizer_digest",
        "embedding_digest",
        "rope_digest",
        "config_digest",
        "dtype",
        "architecture",
        "adapters",
    ],
)
def test_anything_that_enters_below_shares_nothing(field):
    base = tiny("llama").geometry
    value = ("tuned@1234",) if field == "adapters" else "other"
    assert shared_layers(base, replace(base, **{field: value})) == 0
    assert shared_layers(replace(base, **{field: value}), base) == 0


def test_names_do_not_matter():
    base = tiny("llama").geometry
    assert (
        shared_layers(base, replace(base, model_id="x", commit="y", weights_digest="head differs"))
        == 4
    )


@torch.no_grad()
def test_a_changed_tokenizer_rope_or_dtype_shares_nothing():
    base = tiny("llama").geometry
    others = [
        tiny("llama", tokenizer="bos"),
        wrapped(tiny_causal("llama", dtype=torch.bfloat16)),
        wrapped(
            tiny_causal("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
        ),
    ]
    assert [shared_layers(base, other.geometry) for other in others] == [0, 0, 0]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_shared_layers_are_handed_over_as_they_are(kind):
    sender, receiver = tiny(kind), tuned(kind, 3)
    translator = identity(sender, receiver)
    for bias in biases(translator):
        bias.add_(3.0)
    snapshot = capture(sender, TEXT)
    handoff = Bridge(translator, sender=sender, receiver=receiver).handoff(
        snapshot, TEXT, repair=RepairPlan(layers=0)
    )
    provenance = handoff.provenance
    assert handoff.decision.verdict == "use_approximate"
    assert handoff.layers is not None
    for layer in range(3):
        assert {provenance.at(layer, t) for t in range(handoff.cached)} == {"exact"}
        for name in ("k", "v"):
            assert torch.equal(
                handoff.layers[layer][name], snapshot.layers[layer][name][: handoff.cached]
            )
    assert provenance.at(3, 10) == "approximate"
    assert provenance.share("exact") == pytest.approx(
        (3 * handoff.cached + 4) / (4 * handoff.cached)
    )
    own = capture(receiver, TEXT)
    for layer in range(3):
        assert torch.allclose(
            handoff.layers[layer]["k"], own.layers[layer]["k"][: handoff.cached], atol=1e-5
        )
    assert not torch.allclose(handoff.layers[3]["k"][10], own.layers[3]["k"][10], atol=0.1)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_all_layers_shared_needs_no_translator(kind):
    """Another head over the same layers: the cache is the receiver's own."""
    sender, receiver = tiny(kind), tuned(kind, 4)
    assert sender.geometry.digest != receiver.geometry.digest
    handoff = Bridge(None, sender=sender, receiver=receiver).handoff(capture(sender, TEXT), TEXT)
    assert handoff.decision.reason == "exact"
    assert handoff.provenance.fidelity == "exact"
    assert handoff.provenance.producer == sender.geometry.digest
    assert handoff.provenance.receiver == receiver.geometry.digest
    assert_exact(handoff, continued(receiver, handoff.ids))


def test_without_a_translator_a_part_is_not_enough():
    sender = tiny("llama")
    handoff = Bridge(None, sender=sender, receiver=tuned("llama", 3)).handoff(
        capture(sender, TEXT), TEXT
    )
    assert handoff.decision.reason == "no_asset"


def test_requests_of_both_kinds_together():
    """One request is shared whole; the other's tokens are not canonical, so it is translated, with
    receiver features."""
    sender, receiver = tiny("llama"), tuned("llama", 4)
    translator = identity(sender, receiver, "embeddings")
    one_by_one = torch.tensor([i for c in TEXT for i in sender.tokenizer(c)["input_ids"]])
    generated = capture(sender, input_ids=one_by_one)
    bridge = Bridge(translator, sender=sender, receiver=receiver)
    plain, other = bridge.handoff_many([(capture(sender, TEXT), TEXT), (generated, TEXT)])
    assert plain.decision.reason == "exact"
    assert other.decision.reason == "ungated"
    assert other.provenance.fidelity == "approximate"
    assert_exact(plain, continued(receiver, plain.ids))


def test_a_setting_that_is_no_weight_is_part_of_the_contract():
    plain, other = (
        wrapped(tiny_causal("llama", 0)),
        wrapped(tiny_causal("llama", 0, rms_norm_eps=0.5)),
    )
    assert plain.geometry.weights_digest == other.geometry.weights_digest
    assert plain.geometry.digest != other.geometry.digest
    assert shared_layers(plain.geometry, other.geometry) == 0
