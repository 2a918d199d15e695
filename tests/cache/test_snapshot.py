"""A cache as a value: in from transformers, out again, to disk and back, with padding and holes."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from kvbridge import Bridge, KVSnapshot, RepairPlan, capture
from kvbridge.errors import CorruptFile, UsageError
from kvbridge.geometry import digest_text
from kvbridge.model.probe import cache_argument
from tests.handoff.handoffs import PLANS, assert_exact, continued, identity, renamed
from tests.models import EXACT_KINDS, TEXT, UNICODE_TEXT, tiny, tiny_causal, wrapped

PROMPT = TEXT[:180]


def filled(kind, ids, **arguments) -> DynamicCache:
    model, cache = tiny(kind).model, DynamicCache()
    with torch.no_grad():
        model(input_ids=ids, **cache_argument(model, cache), **arguments)
    return cache


def same_values(one: KVSnapshot, other: KVSnapshot) -> bool:
    pairs = zip(one.layers, other.layers, strict=True)
    return all(
        first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)
        for first, second in pairs
    )


def test_capture_is_the_models_own_forward():
    model = tiny("gemma3")
    ids = model.encode(PROMPT).ids
    cache = filled("gemma3", ids[None])
    snapshot = capture(model, PROMPT)
    assert torch.equal(snapshot.token_ids, ids)
    assert torch.equal(snapshot.positions, torch.arange(len(ids)))
    assert snapshot.text_digest == digest_text(PROMPT)
    assert snapshot.characters == len(PROMPT)
    assert len(snapshot) == len(ids)
    assert snapshot.provenance.fidelity == "exact"
    for layer, held in zip(cache.layers, snapshot.layers, strict=True):
        assert torch.allclose(held["k"], layer.keys[0].transpose(0, 1), atol=1e-5)
        assert torch.allclose(held["v"], layer.values[0].transpose(0, 1), atol=1e-5)
    assert snapshot.nbytes == len(ids) * model.geometry.bytes_per_token


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_to_a_transformers_cache_and_back(kind):
    model = tiny(kind)
    snapshot = capture(model, PROMPT)
    cut = snapshot.select(torch.arange(len(snapshot) - 1))
    out = model.model(
        snapshot.token_ids[None, -1:], **cache_argument(model.model, cut.to_cache(model))
    )
    dense = model.model(snapshot.token_ids[None])
    assert torch.allclose(out.logits[0, -1], dense.logits[0, -1], atol=1e-4)


def test_from_pairs_equals_from_a_cache():
    model = tiny("llama")
    ids = model.encode(PROMPT).ids
    cache = filled("llama", ids[None])
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    for form in (cache, pairs, tuple(pairs), [(k, v, None) for k, v in pairs]):
        snapshot = KVSnapshot.from_cache(form, model, ids)
        assert same_values(snapshot, KVSnapshot.from_cache(cache, model, ids[None]))
        assert snapshot.text_digest == digest_text(PROMPT)


class OldForward(torch.nn.Module):
    def forward(self, input_ids, past_key_values=None): ...


class NewForward(torch.nn.Module):
    def forward(self, input_ids, cache=None): ...


class WrappedForward(torch.nn.Module):
    def forward(self, *args, **kwargs): ...

    forward.__wrapped__ = NewForward.forward  # type: ignore[attr-defined]


def test_old_and_new_keyword():
    assert cache_argument(OldForward(), 1) == {"past_key_values": 1}
    assert cache_argument(NewForward(), 1) == {"cache": 1}
    assert cache_argument(WrappedForward(), 1) == {"cache": 1}
    model = tiny("llama").model
    (name,) = cache_argument(model, 1)
    assert name in inspect.signature(inspect.unwrap(type(model).forward)).parameters


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_left_padding_is_left_out(kind):
    model = tiny(kind)
    ids = model.encode(PROMPT).ids
    padded = torch.cat((torch.zeros(5, dtype=torch.int64), ids))[None]
    mask = torch.cat((torch.zeros(5, dtype=torch.int64), torch.ones(len(ids), dtype=torch.int64)))[
        None
    ]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = filled(kind, padded, attention_mask=mask, position_ids=positions)
    snapshot = KVSnapshot.from_cache(cache, model, padded, attention_mask=mask)
    plain = capture(model, PROMPT)
    assert torch.equal(snapshot.token_ids, ids)
    assert torch.equal(snapshot.positions, plain.positions)
    assert torch.equal(snapshot.spans, plain.spans)
    assert snapshot.text_digest == plain.text_digest
    for layer, plain_layer in zip(snapshot.layers, plain.layers, strict=True):
        assert all(torch.allclose(layer[n], plain_layer[n], atol=1e-4) for n in layer)


def test_after_generate_the_last_token_is_not_cached():
    model = tiny("llama")
    ids = model.encode(PROMPT).ids[None]
    out = model.model.generate(
        ids, max_new_tokens=12, do_sample=False, return_dict_in_generate=True
    )
    snapshot = KVSnapshot.from_cache(out.past_key_values, model, out.sequences)
    assert len(snapshot) == out.sequences.shape[1] - 1
    assert torch.equal(snapshot.token_ids, out.sequences[0, :-1])
    handoff = Bridge(None, sender=model, receiver=model).handoff(snapshot, input_ids=out.sequences)
    assert handoff.decision.reason == "exact", str(handoff.decision)
    assert_exact(handoff, continued(model, out.sequences[0]))


def test_what_from_cache_refuses():
    model = tiny("mistral_sliding")
    ids = model.encode(PROMPT).ids
    sliding = tiny("gemma3")
    short = DynamicCache(config=sliding.model.config)
    sliding.model(sliding.encode(PROMPT).ids[None], past_key_values=short)
    with pytest.raises(UsageError, match="sliding layers have dropped"):
        KVSnapshot.from_cache(short, sliding, sliding.encode(PROMPT).ids)
    cache = filled("mistral_sliding", ids[None])
    with pytest.raises(UsageError, match="input_ids only 5"):
        KVSnapshot.from_cache(cache, model, ids[:5])
    with pytest.raises(UsageError, match="text="):
        KVSnapshot.from_cache(cache, model, ids, text="something else")
    with pytest.raises(UsageError, match="layers without keys"):
        KVSnapshot.from_cache(DynamicCache(config=model.model.config), model, ids)
    with pytest.raises(UsageError, match="filled"):
        KVSnapshot.from_cache(DynamicCache(), model, ids)
    two = filled("mistral_sliding", ids[None].repeat(2, 1))
    with pytest.raises(UsageError, match="one request"):
        KVSnapshot.from_cache(two, model, ids)
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    with pytest.raises(UsageError, match="4 layers"):
        KVSnapshot.from_cache(pairs[:3], model, ids)


def test_a_cache_whose_every_layer_slides_is_refused():
    """All layers dropped the same tokens: the lengths agree, and nothing says which tokens are
    left."""
    model = tiny("mistral_sliding")
    ids = model.encode(PROMPT).ids
    cache = DynamicCache(config=model.model.config)
    model.model(ids[None], past_key_values=cache)
    assert {layer.keys.shape[2] for layer in cache.layers} == {7}
    with pytest.raises(UsageError, match="not the first ones"):
        KVSnapshot.from_cache(cache, model, ids)
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    with pytest.raises(UsageError, match="not the first ones"):
        KVSnapshot.from_cache(pairs, model, ids)


def test_static_caches_are_refused():
    model = tiny("llama")
    ids = model.encode(PROMPT).ids
    cache = StaticCache(config=model.model.config, max_cache_len=len(ids))
    model.model(ids[None, :-4], past_key_values=cache)
    with pytest.raises(UsageError, match="static"):
        KVSnapshot.from_cache(cache, model, ids)


def test_a_short_prompt_within_every_window_is_accepted():
    model = tiny("mistral_sliding")
    ids = model.encode(PROMPT).ids[:6]
    cache = DynamicCache(config=model.model.config)
    model.model(ids[None], past_key_values=cache)
    assert len(KVSnapshot.from_cache(cache, model, ids)) == 6


@pytest.mark.parametrize("field", ["positions", "spans", "order", "negative", "layers", "shape"])
def test_a_snapshot_is_checked_at_construction(field):
    snapshot = capture(tiny("llama"), PROMPT[:40])
    bad = {
        "positions": {"positions": snapshot.positions[:-1]},
        "spans": {"spans": snapshot.spans[:, :1]},
        "order": {"positions": snapshot.positions.flip(0)},
        "negative": {"positions": snapshot.positions - 1},
        "layers": {"layers": snapshot.layers[:-1]},
        "shape": {
            "layers": (
                {"k": snapshot.layers[0]["k"][:, :1], "v": snapshot.layers[0]["v"]},
                *snapshot.layers[1:],
            )
        },
    }[field]
    with pytest.raises(UsageError):
        replace(snapshot, **bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load_bit_equal(tmp_path, dtype):
    model = wrapped(tiny_causal("llama", dtype=dtype))
    whole = capture(model, UNICODE_TEXT)
    for number, snapshot in enumerate((whole, whole.select(torch.tensor([0, 3, 4, 9])))):
        path = tmp_path / f"{number}.safetensors"
        snapshot.save(path)
        loaded = KVSnapshot.load(path)
        assert same_values(snapshot, loaded)
        for name in ("token_ids", "positions", "spans"):
            assert torch.equal(getattr(snapshot, name), getattr(loaded, name))
        for name in ("text_digest", "characters", "geometry", "provenance"):
            assert getattr(snapshot, name) == getattr(loaded, name)
        assert loaded.geometry.digest == model.geometry.digest
        snapshot.save(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == path.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.safetensors", "1.safetensors", "again"]
    handoff = Bridge(None, sender=model, receiver=model).handoff(
        KVSnapshot.load(tmp_path / "0.safetensors"), UNICODE_TEXT
    )
    assert handoff.decision.reason == "exact"


def test_a_missing_file_is_corrupt(tmp_path):
    with pytest.raises(CorruptFile):
        KVSnapshot.load(tmp_path / "none")


def holes_of(snapshot: KVSnapshot, *left_out: int) -> KVSnapshot:
    return snapshot.select(torch.tensor([i for i in range(len(snapshot)) if i not in left_out]))


@pytest.mark.parametrize(
    "left_out", [(9,), (0, 1, 2, 20, 21, 40), tuple(range(30, 60)), tuple(range(1, 60, 2))]
)
@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_holes_are_recomputed(kind, left_out):
    model = tiny(kind)
    snapshot = holes_of(capture(model, PROMPT), *left_out)
    assert len(snapshot) == len(model.encode(PROMPT)) - len(left_out)
    with pytest.raises(UsageError, match="holes"):
        snapshot.to_cache(model)
    expected = continued(model, model.encode(PROMPT).ids)
    handoff = Bridge(None, sender=model, receiver=model).handoff(snapshot, PROMPT)
    assert handoff.decision.reason == "exact"
    assert_exact(handoff, expected)
    sender = renamed(model)
    through = Bridge(identity(sender, model), sender=sender, receiver=model)
    translated = through.handoff(
        holes_of(capture(sender, PROMPT), *left_out), PROMPT, repair=RepairPlan(layers=0)
    )
    assert_exact(translated, expected)
    repaired = [t for t in left_out if t >= 4]
    assert all(translated.provenance.at(2, t) == "repaired" for t in repaired)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_snapshot_of_a_prefix(kind, plan):
    """The conversation went on: what the snapshot does not reach is recomputed."""
    model = tiny(kind)
    sender = renamed(model)
    expected, length = continued(model, model.encode(TEXT).ids), 120
    handoff = Bridge(identity(sender, model), sender=sender, receiver=model).handoff(
        capture(sender, TEXT[:length]), TEXT, repair=PLANS[plan]
    )
    assert_exact(handoff, expected)
    own = Bridge(None, sender=model, receiver=model).handoff(
        capture(model, TEXT[:length]), TEXT, repair=PLANS[plan]
    )
    assert torch.allclose(own.layers[3]["v"], handoff.layers[3]["v"], atol=1e-4)
    assert own.decision.reason == "exact"


def test_cut_of_a_translation_is_refused():
    model = tiny("llama")
    sender = renamed(model)
    done = Bridge(identity(sender, model), sender=sender, receiver=model).handoff(
        capture(sender, PROMPT), PROMPT
    )
    with pytest.raises(UsageError, match="own cache"):
        done.snapshot().select(torch.arange(5))


def test_an_exact_handoff_can_be_handed_over_again():
    model = tiny("gemma3")
    bridge = Bridge(None, sender=model, receiver=model)
    first = bridge.handoff(capture(model, PROMPT), PROMPT)
    snapshot = first.snapshot()
    assert snapshot.provenance.depth == 0
    again = bridge.handoff(snapshot, PROMPT)
    assert_exact(again, continued(model, model.encode(PROMPT).ids))


def test_to_cache_is_of_its_own_model():
    with pytest.raises(UsageError, match="not of"):
        capture(tiny("llama"), PROMPT).to_cache(tiny("llama", seed=1))


def test_a_handed_over_cache_remembers_that_it_is_a_translation() -> None:
    """However it travels (taken, grown by generation, through a snapshot), it is never again the
    model's own."""
    receiver = tiny("llama")
    sender = renamed(receiver)
    bridge = Bridge(identity(sender, receiver), sender=sender, receiver=receiver)
    handoff = bridge.handoff(capture(sender, TEXT), TEXT)
    assert handoff.provenance.fidelity == "approximate"
    grown: Any = handoff.generate(4, return_dict_in_generate=True, do_sample=False)
    for cache, ids in (
        (handoff.cache, handoff.ids),
        (handoff.snapshot().to_cache(receiver), handoff.ids),
        (getattr(grown, "cache", None) or grown.past_key_values, grown.sequences[0]),
    ):
        snapshot = KVSnapshot.from_cache(cache, receiver, ids)
        assert snapshot.provenance.depth == 1
        assert snapshot.provenance.fidelity == "approximate"
