"""What every engine behind the port promises, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbridge import Bridge, RepairPlan, Translator, generate_many
from kvbridge.cache.snapshot import LayerKV
from kvbridge.engines.fake import FakeEngine
from kvbridge.engines.port import Engine, Prefilled
from kvbridge.engines.snapshots import captured
from kvbridge.engines.transformers import TransformersEngine, engine_of
from kvbridge.errors import UsageError
from tests.handoff.handoffs import identity
from tests.models import TEXT, tiny

ENGINES: dict[str, Callable[[int], Engine]] = {
    "transformers": lambda seed: TransformersEngine(tiny("llama", seed)),
    "transformers_sliding": lambda seed: TransformersEngine(tiny("gemma3", seed)),
    "fake": FakeEngine,
}
NEAR: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(params=ENGINES)
def make(request) -> Callable[[int], Engine]:
    return ENGINES[request.param]


@pytest.fixture
def engine(make) -> Engine:
    return make(0)


def prompt_ids(engine: Engine) -> Tensor:
    return engine.encode(TEXT).ids[:40]


def assert_near(rows: list[LayerKV], expected: list[LayerKV]) -> None:
    for layer, own in zip(rows, expected, strict=True):
        for name, tensor in own.items():
            torch.testing.assert_close(layer[name], tensor, **NEAR)


def test_it_is_an_engine(engine):
    assert isinstance(engine, Engine)
    assert engine_of(engine) is engine
    rows = engine.prefill(prompt_ids(engine))
    for layer, own in zip(engine.geometry.layers, rows, strict=True):
        shapes = {s.name: (40, s.heads, s.width) for s in layer.streams}
        assert {name: tuple(t.shape) for name, t in own.items()} == shapes
        assert all(t.dtype == engine.dtype for t in own.values())
    assert str(engine.dtype) == f"torch.{engine.geometry.dtype}"
    assert engine.changed() is None


def test_ids_and_text(engine):
    encoding = engine.encode(TEXT)
    text, again = engine.encode_ids(encoding.ids)
    assert text == engine.spell(encoding.ids) == TEXT
    assert torch.equal(again.ids, encoding.ids)
    assert torch.equal(again.spans, encoding.spans)


def test_keys_go_to_content_space_and_back(engine):
    rows = engine.prefill(prompt_ids(engine))
    places = torch.arange(40)
    for layer, own in enumerate(rows):
        content = engine.rotation.unrotate(own["k"], places, layer)
        torch.testing.assert_close(engine.rotation.rotate(content, places, layer), own["k"], **NEAR)


def test_a_prefill_is_decoding_step_by_step(engine):
    ids = prompt_ids(engine)
    rows = engine.prefill(ids)
    layers = engine.prefill(ids[:1])
    for place in range(1, len(ids)):
        decoded = engine.decode(ids[place : place + 1], layers)
        layers = decoded.layers
    assert_near(layers, rows)
    several = engine.decode(ids[10:], [{n: t[:10] for n, t in x.items()} for x in rows])
    assert several.logits.shape == (30, engine.geometry.vocabulary)
    torch.testing.assert_close(several.logits[-1], decoded.logits[-1], **NEAR)
    nothing = [{n: t[:0] for n, t in x.items()} for x in rows]
    torch.testing.assert_close(engine.decode(ids, nothing).logits[-1], decoded.logits[-1], **NEAR)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_first_layers_are_a_prefills(engine, count):
    ids = prompt_ids(engine)
    rows = engine.prefill(ids)
    whole = engine.first_layers(ids, count)
    assert len(whole.layers) == count
    for layer, own in zip(whole.layers, rows, strict=False):
        assert all(torch.equal(layer[name], own[name]) for name in own)
    past = [{n: t[:15] for n, t in x.items()} for x in rows]
    copies = [{n: t.clone() for n, t in x.items()} for x in past]
    after = engine.first_layers(ids[15:], count, past=past)
    torch.testing.assert_close(after.hidden, whole.hidden[15:], **NEAR)
    assert_near(after.layers, [{n: t[15:] for n, t in x.items()} for x in whole.layers])
    entering = engine.first_layers(ids[15:], count, entering=0, past=past).hidden
    torch.testing.assert_close(entering, engine.first_layers(ids, 0).hidden[15:], **NEAR)
    assert_near(past, copies)
    with pytest.raises(UsageError, match="first layers"):
        engine.first_layers(ids, len(engine.geometry.layers))


def test_repairing_everything_is_a_prefill(engine):
    ids = prompt_ids(engine)
    rows = engine.prefill(ids)
    layers = [{n: torch.randn_like(t) for n, t in x.items()} for x in rows]
    engine.repair(ids, layers, torch.arange(len(ids)))
    assert_near(layers, rows)


def test_a_repair_writes_the_chosen_rows_alone_and_tells_of_them(engine):
    ids = prompt_ids(engine)
    rows = engine.prefill(ids)
    noise = torch.Generator().manual_seed(1)
    layers = [{n: torch.randn(t.shape, generator=noise) for n, t in x.items()} for x in rows]
    before = [{n: t.clone() for n, t in x.items()} for x in layers]
    chosen = torch.tensor([0, 1, 2, 20, 39])
    forward = engine.repair(ids, layers, chosen, following=torch.tensor([7]), record_queries=True)
    others = [t for t in range(40) if t not in chosen]
    for layer, old in zip(layers, before, strict=True):
        for name in old:
            assert torch.equal(layer[name][others], old[name][others])
            assert not torch.equal(layer[name][chosen], old[name][chosen])
    assert_near(*([{n: t[:3] for n, t in x.items()} for x in both] for both in (layers, rows)))
    assert forward.states is not None
    assert forward.states.shape == (6, engine.geometry.hidden_size)
    queries = forward.queries.at(1, torch.tensor([3, 5]), torch.tensor([20, 40]))
    width = engine.geometry.layers[1].stream("k").width
    assert queries.shape == (2, engine.geometry.attention_heads, width)
    unasked = engine.repair(ids, layers, torch.zeros(0, dtype=torch.int64))
    assert unasked.states is None
    assert unasked.queries is None


def test_a_model_hands_over_to_itself_exactly(engine):
    handoff = Bridge(None, sender=engine, receiver=engine).handoff(captured(engine, TEXT), TEXT)
    assert handoff.decision.reason == "exact"
    assert handoff.provenance.fidelity == "exact"
    assert_near(handoff.layers, engine.prefill(handoff.ids[:-1]))
    dense = engine.generate(Prefilled(handoff.ids, None), 8, do_sample=False)
    assert torch.equal(handoff.generate(8, do_sample=False), dense)
    assert handoff.text(8, do_sample=False) == engine.spell(dense[0, len(handoff.ids) :])


def test_a_translated_handoff_decodes_and_remembers_what_it_is(make):
    sender, receiver = make(0), make(1)
    bridge = Bridge(translator_of(sender, receiver), sender=sender, receiver=receiver)
    snapshot = captured(sender, TEXT)
    handoff, refused = bridge.handoff_many(
        [(snapshot, TEXT), (captured(receiver, TEXT), TEXT)], repair=RepairPlan(tail=4)
    )
    assert handoff.decision.reason == "ungated"
    assert handoff.provenance.fidelity == "approximate"
    assert refused.decision.reason == "wrong_pair"
    together = generate_many([handoff, refused], 6, do_sample=False)
    for one, ids in zip((handoff, refused), together, strict=True):
        assert torch.equal(one.generate(6, do_sample=False)[0], ids)
    back = Bridge(None, sender=receiver, receiver=receiver).handoff(handoff.snapshot(), TEXT)
    assert back.decision.reason == "lineage"


def translator_of(sender: Engine, receiver: Engine) -> Translator:
    """Maps that change nothing, with receiver features that count for nothing."""
    return identity(sender, receiver, "hidden:1")


def test_across_engines():
    """A transformers sender and a receiver that is none, whose tokens are others."""
    sender, receiver = TransformersEngine(tiny("llama")), FakeEngine(3)
    handoff = Bridge(None, sender=sender, receiver=receiver).handoff(captured(sender, TEXT), TEXT)
    assert handoff.decision.reason == "no_asset"
    assert handoff.text(5) == receiver.spell(handoff.generate(5)[0, -5:])
    with pytest.raises(UsageError, match="no transformers cache"):
        _ = handoff.cache


def test_what_the_fake_does_not_do_is_misuse():
    fake = FakeEngine()
    with pytest.raises(UsageError, match="greedily"):
        fake.generate(Prefilled(torch.tensor([1]), None), 4, num_beams=2)
    with pytest.raises(UsageError, match="empty"):
        fake.generate(Prefilled(torch.tensor([], dtype=torch.int64), None))
    with pytest.raises(UsageError, match="chat template"):
        fake.render([])
    with pytest.raises(UsageError, match="an engine"):
        engine_of("demo:sender")
