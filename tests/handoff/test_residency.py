"""Where a translator's tensors are, and when they get there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvbridge import Asset, Bridge, Translator, capture
from kvbridge.asset.manifest import Manifest
from kvbridge.handoff.ports import Resident
from tests.handoff.handoffs import biases, identity, renamed
from tests.models import TEXT, tiny, tiny_causal, wrapped
from tests.pretend import THERE, Pretend, marked, move

RECEIVER = tiny("llama")
SENDER = renamed(RECEIVER)


@pytest.fixture
def moves(monkeypatch) -> list[str]:
    """Every `Translator.to`, by device."""
    devices: list[str] = []
    real = Translator.to

    def to(self, device, dtype=None):
        devices.append(torch.device(device).type)
        return real(self, device, dtype)

    monkeypatch.setattr(Translator, "to", to)
    return devices


def asset(translator: Translator) -> Asset:
    manifest = Manifest(
        {"weights_bytes": 1234}, SENDER.geometry, RECEIVER.geometry, translator.maps
    )
    return Asset(Path("nowhere"), "digest-of-asset", manifest, translator)


def test_the_first_grant_moves_the_tensors_and_no_other(moves):
    bridge = Bridge(identity(SENDER, RECEIVER), sender=SENDER, receiver=RECEIVER)
    assert moves == []
    bridge.handoff(capture(RECEIVER, TEXT), TEXT)
    assert moves == [], "a refused request needs no translator"
    for _ in range(2):
        assert bridge.handoff(capture(SENDER, TEXT), TEXT).decision.accepted
    assert moves == ["cpu"]


def test_an_exact_handoff_moves_nothing(moves):
    bridge = Bridge(identity(RECEIVER, RECEIVER), sender=RECEIVER, receiver=RECEIVER)
    assert bridge.handoff(capture(RECEIVER, TEXT), TEXT).decision.reason == "exact"
    assert moves == []


def test_tensors_reach_the_receivers_device_when_they_are_first_needed(moves):
    receiver = wrapped(tiny_causal("llama", 1), name="there")
    sender = tiny("llama")
    translator = identity(sender, receiver, "embeddings")
    with Pretend():
        move(receiver.model)
        bridge = Bridge(translator, sender=sender, receiver=receiver)
        assert not any(marked(t) for t in translator.tensors.values())
        handoffs = [bridge.handoff(capture(sender, TEXT), TEXT) for _ in range(2)]
        assert [h.decision.reason for h in handoffs] == ["ungated"] * 2
        assert handoffs[0].layers[2]["v"].device == THERE
        assert moves == ["cuda"]
        (held,) = bridge.resident._held.values()
        assert all(marked(t) for t in held.tensors.values())
        assert not any(marked(t) for t in translator.tensors.values())


class Counting:
    """A ledger that counts, and gives `given` (None: bytes alone)."""

    def __init__(self, given: Translator | None) -> None:
        self.given, self.held = given, 0

    @contextmanager
    def lease(self, asset: Asset) -> Iterator[Translator | None]:
        self.held += 1
        yield self.given


def test_a_ledger_that_only_counts_leaves_the_tensors_to_the_default(moves):
    ledger = Counting(None)
    bridge = Bridge(
        asset(identity(SENDER, RECEIVER)), sender=SENDER, receiver=RECEIVER, ledger=ledger
    )
    for _ in range(2):
        assert bridge.handoff(capture(SENDER, TEXT), TEXT).decision.accepted
    assert ledger.held == 2
    assert moves == ["cpu"]


def test_a_ledger_that_gives_the_translator_is_believed(moves):
    """Nothing is moved: the ledger says where it may be used."""
    other = identity(SENDER, RECEIVER)
    for bias in biases(other):
        bias.add_(1.0)
    given = Bridge(
        asset(identity(SENDER, RECEIVER)), sender=SENDER, receiver=RECEIVER, ledger=Counting(other)
    ).handoff(capture(SENDER, TEXT), TEXT)
    assert moves == []
    plain = Bridge(other, sender=SENDER, receiver=RECEIVER).handoff(capture(SENDER, TEXT), TEXT)
    assert torch.equal(given.layers[2]["v"], plain.layers[2]["v"])


def test_a_default_ledger_can_be_shared():
    """One receiver behind several bridges: its translator is held once."""
    bridges = [Bridge(asset(identity(SENDER, RECEIVER)), sender=SENDER, receiver=RECEIVER)]
    shared = Resident(bridges[0].pair.receiver)
    handle = bridges[0].pair.handle
    assert handle is not None
    for _ in range(2):
        lease = shared.lease(handle)
        assert lease is not None
        with lease as translator:
            assert translator is next(iter(shared._held.values()))
    assert len(shared._held) == 1


def test_no_room_refuses_only_what_needs_a_translator():
    class Full:
        def lease(self, asset):
            return None

    sender, receiver = tiny("llama"), tiny("llama")
    bridge = Bridge(
        asset(identity(sender, receiver)), sender=sender, receiver=receiver, ledger=Full()
    )
    one_by_one = torch.tensor([i for c in TEXT for i in sender.tokenizer(c)["input_ids"]])
    generated = capture(sender, input_ids=one_by_one)
    handoffs = bridge.handoff_many([(capture(sender, TEXT), TEXT), (generated, TEXT)])
    assert [h.decision.reason for h in handoffs] == ["exact", "no_room"]
    assert handoffs[1].decision.detail == "no room for 1234 bytes"
