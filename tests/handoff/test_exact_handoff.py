"""Where nothing is lost in translation, nothing changes: logits and greedy tokens are the
receiver's own."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kvbridge import Bridge, KVSnapshot, RepairPlan, capture, generate_many
from tests.handoff.handoffs import (
    NEW_TOKENS,
    PLANS,
    Continuation,
    assert_exact,
    continued,
    identity,
    renamed,
    zeroed,
)
from tests.models import EXACT_KINDS, TEXT, random_texts, tiny, tiny_causal, wrapped

MORE_KINDS = (
    "phi3_sliding",
    "mistral_sliding",
    "cohere",
    "glm",
    "neox",
    "smollm3",
    "llama_yarn",
    "llama_llama3",
)
LENGTH = 100


@cache
def native(kind: str, length: int = LENGTH) -> tuple[str, Continuation]:
    model = tiny(kind)
    text = model.tokenizer.decode(model.encode(TEXT).ids[:length])
    return text, continued(model, model.encode(text).ids)


@cache
def own_snapshot(kind: str) -> KVSnapshot:
    return capture(tiny(kind), native(kind)[0])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_same_model(kind, plan):
    model, (text, expected) = tiny(kind), native(kind)
    handoff = Bridge(None, sender=model, receiver=model).handoff(
        own_snapshot(kind), text, repair=PLANS[plan]
    )
    assert handoff.decision.verdict == "use"
    assert handoff.decision.reason == "exact"
    assert handoff.provenance.fidelity == "exact"
    assert handoff.remaining_ids.shape == (1, 1)
    assert_exact(handoff, expected)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_identity_translation(kind, plan):
    """No layer is shared, so every key is unrotated, mapped, rotated, cached and repaired."""
    check_identity(kind, PLANS[plan])


@pytest.mark.parametrize("kind", MORE_KINDS)
def test_identity_translation_of_more_architectures(kind):
    for plan in ("nothing", "everything"):
        check_identity(kind, PLANS[plan])


def check_identity(kind, plan):
    receiver, (text, expected) = tiny(kind), native(kind)
    sender = renamed(receiver)
    handoff = Bridge(identity(sender, receiver), sender=sender, receiver=receiver).handoff(
        capture(sender, text), text, repair=plan
    )
    assert handoff.decision.verdict == "use_approximate"
    assert handoff.provenance.fidelity == "approximate"
    assert_exact(handoff, expected)


@pytest.mark.parametrize("features", ["embeddings", "hidden:2"])
def test_identity_translation_beside_receiver_features(features):
    receiver, (text, expected) = tiny("qwen3"), native("qwen3")
    sender = renamed(receiver)
    translator = identity(sender, receiver, features)
    for plan in (RepairPlan(layers=0), RepairPlan(layers=3)):
        handoff = Bridge(translator, sender=sender, receiver=receiver).handoff(
            capture(sender, text), text, repair=plan
        )
        assert_exact(handoff, expected)


def test_gemma_prompt_is_beyond_its_window():
    geometry = tiny("gemma3").geometry
    assert {layer.window_tokens for layer in geometry.layers} == {8, None}
    assert len(tiny("gemma3").encode(native("gemma3")[0])) > 4 * 8


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_a_zeroed_cache_is_noticed(kind):
    """The check above can fail: without its cache, the model goes on differently."""
    model = tiny(kind)
    bridge = Bridge(None, sender=model, receiver=model)
    texts = random_texts(40, 60)
    handoffs = bridge.handoff_many([(capture(model, text), text) for text in texts])
    expected = generate_many(handoffs, NEW_TOKENS, do_sample=False)
    continued_from_zeros = generate_many([zeroed(h) for h in handoffs], NEW_TOKENS, do_sample=False)
    changed = sum(
        not torch.equal(one, other)
        for one, other in zip(continued_from_zeros, expected, strict=True)
    )
    assert changed >= 0.95 * len(texts), f"{changed} of {len(texts)}"
    with pytest.raises(AssertionError, match="logits are off"):
        assert_exact(zeroed(handoffs[0]), continued(model, handoffs[0].ids))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_eager_attention(kind):
    """The other tests run the default (sdpa); masks reach eager attention another way."""
    model = tiny_causal(kind)
    model.set_attn_implementation("eager")
    receiver = wrapped(model)
    sender, text = renamed(receiver), native(kind)[0]
    handoff = Bridge(identity(sender, receiver), sender=sender, receiver=receiver).handoff(
        capture(sender, text), text, repair=PLANS["everything"]
    )
    assert_exact(handoff, continued(receiver, handoff.ids))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "llama_yarn"])
def test_bfloat16(kind):
    """Keys go through fp32 and are rounded once: what is cached is within a few units in the last
    place."""
    receiver = wrapped(tiny_causal(kind, dtype=torch.bfloat16))
    sender, text = renamed(receiver), native(kind)[0]
    own = capture(receiver, text)
    for plan in ("nothing", "everything"):
        handoff = Bridge(identity(sender, receiver), sender=sender, receiver=receiver).handoff(
            capture(sender, text), text, repair=PLANS[plan]
        )
        assert handoff.layers is not None
        for layer, expected in zip(handoff.layers, own.layers, strict=True):
            for name in ("k", "v"):
                assert layer[name].dtype == torch.bfloat16
                off = (layer[name][12:60].float() - expected[name][12:60].float()).abs().max()
                assert float(off) <= 2**-6 * float(expected[name].abs().max())
        assert handoff.generate(4, do_sample=False).shape == (1, len(handoff.ids) + 4)


def test_the_snapshot_is_not_modified():
    model, (text, _) = tiny("llama"), native("llama")
    snapshot = capture(model, text)
    before = [{n: t.clone() for n, t in layer.items()} for layer in snapshot.layers]
    handoff = Bridge(None, sender=model, receiver=model).handoff(
        snapshot, text, repair=RepairPlan(tail=32)
    )
    handoff.generate(8)
    for layer, kept in zip(snapshot.layers, before, strict=True):
        assert all(torch.equal(layer[name], kept[name]) for name in kept)
