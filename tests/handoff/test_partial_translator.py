"""A translator without maps for the lowest layers: they are the receiver's to compute, never left
empty."""

import pytest
import torch

import kvbridge
from kvbridge.cache.prefill import capture
from tests.fitting.pairs import documents, fitted, receiver, sender

TEXT = documents()[-1].text


@pytest.mark.parametrize("features", ["none", "embeddings"])
def test_layers_without_a_map_are_the_receivers_own(features):
    whole = fitted(receiver_features=features).translator
    upper = whole.only(range(2, 3))
    bridge = kvbridge.Bridge(upper, sender=sender(), receiver=receiver())
    handoff = bridge.handoff(
        capture(sender(), TEXT), TEXT, repair=kvbridge.RepairPlan(layers=0, sinks=0)
    )
    assert handoff.decision.accepted
    own = capture(receiver(), TEXT)
    for layer in range(2):
        for name, tensor in handoff.layers[layer].items():
            torch.testing.assert_close(tensor, own.layers[layer][name][:-1], rtol=1e-5, atol=1e-5)
    assert {handoff.provenance.at(layer, 7) for layer in range(2)} == {"exact"}
    assert handoff.provenance.at(2, 7) == "approximate"


def test_a_translator_without_the_last_layer_is_of_no_use():
    whole = fitted().translator
    lower = whole.only(range(2))
    bridge = kvbridge.Bridge(lower, sender=sender(), receiver=receiver())
    assert bridge.handoff(capture(sender(), TEXT), TEXT).decision.reason == "no_asset"
