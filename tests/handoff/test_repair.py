"""What the receiver computes itself: chosen tokens, first layers, and what may be called exact
afterwards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from kvbridge import Bridge, RepairPlan, capture
from kvbridge.cache.features import first_layers, hidden_layer, stopped_at
from kvbridge.cache.prefill import capture_batch, run_decoder
from kvbridge.cache.provenance import FIDELITIES, spans_of
from kvbridge.cache.recompute import recompute
from kvbridge.cache.snapshot import build_cache
from kvbridge.errors import UsageError
from kvbridge.handoff.plan import fidelity_map
from kvbridge.model.probe import cache_argument, cached_layers
from tests.handoff.handoffs import biases, identity, renamed
from tests.models import EXACT_KINDS, TEXT, tiny, tiny_causal, wrapped

LENGTH = 40
CHOICES = {
    "sinks": (0, 1, 2, 3),
    "tail": (36, 37, 38, 39),
    "scattered": (2, 9, 10, 25, 33),
    "both_ends": (0, 1, 20, 38, 39),
    "one": (17,),
    "all": tuple(range(LENGTH)),
    "none": (),
}
WINDOWED = (*EXACT_KINDS, "mistral_sliding", "phi3_sliding", "glm", "smollm3")


def prompt_ids(kind):
    return tiny(kind).encode(TEXT).ids[:LENGTH]


def noise(kind, seed=0):
    """A cache of random values `[tokens, heads, width]` per layer and stream."""
    draw = torch.Generator().manual_seed(seed)
    return [
        {s.name: torch.randn(LENGTH, s.heads, s.width, generator=draw) for s in layer.streams}
        for layer in tiny(kind).geometry.layers
    ]


@torch.no_grad()
def one_by_one(model, ids, layers, chosen):
    """Oracle: each chosen token is fed alone after the cache before it, as an ordinary decoding
    step."""
    layers = [{n: t.clone() for n, t in layer.items()} for layer in layers]
    for token in chosen:
        full = DynamicCache()
        for index, layer in enumerate(layers):
            if token:
                full.update(*(layer[n][:token].transpose(0, 1)[None] for n in ("k", "v")), index)
        before = (
            build_cache(model, [{n: t[:token] for n, t in layer.items()} for layer in layers])
            if token
            else DynamicCache(config=model.model.config)
        )
        model.decoder(
            input_ids=ids[None, token : token + 1],
            position_ids=torch.tensor([[token]]),
            use_cache=True,
            **cache_argument(model.decoder, before),
        )
        for layer, filled in zip(layers, before.layers, strict=True):
            layer["k"][token], layer["v"][token] = filled.keys[0, :, -1], filled.values[0, :, -1]
    return layers


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", WINDOWED)
def test_recompute_is_an_ordinary_decoding_step(kind, choice):
    model, ids, chosen = tiny(kind), prompt_ids(kind), CHOICES[choice]
    layers = noise(kind)
    before = [{n: t.clone() for n, t in layer.items()} for layer in layers]
    expected = one_by_one(model, ids, layers, chosen)
    recompute(model, ids, layers, torch.tensor(chosen, dtype=torch.int64))
    others = [t for t in range(LENGTH) if t not in chosen]
    for layer, oracle, old in zip(layers, expected, before, strict=True):
        for name in ("k", "v"):
            assert torch.allclose(layer[name], oracle[name], atol=1e-4)
            assert torch.equal(layer[name][others], old[name][others])


@pytest.mark.parametrize("kind", WINDOWED)
def test_recomputing_everything_is_a_prefill(kind):
    model, ids = tiny(kind), prompt_ids(kind)
    layers = noise(kind)
    recompute(model, ids, layers, torch.arange(LENGTH))
    own = capture(model, input_ids=ids)
    for layer, expected in zip(layers, own.layers, strict=True):
        assert all(torch.allclose(layer[n], expected[n], atol=1e-4) for n in expected)


def test_chosen():
    assert RepairPlan().chosen(10).tolist() == [0, 1, 2, 3]
    assert RepairPlan(sinks=0).chosen(10).tolist() == []
    assert RepairPlan(sinks=0, tail=4).chosen(10).tolist() == [7, 8, 9]
    assert RepairPlan(sinks=1, tail=2, tokens=(3, 5, 99)).chosen(10).tolist() == [0, 3, 5, 9]
    assert RepairPlan(sinks=9, tail=50).chosen(6).tolist() == list(range(6))
    extra = torch.zeros(8, dtype=torch.bool)
    extra[6] = True
    assert RepairPlan(sinks=1).chosen(8, extra).tolist() == [0, 6]
    assert extra.tolist() == [False] * 6 + [True, False], "the argument is not modified"


def dependency_oracle(layers, cached, exact_layers, chosen):
    """Brute force over what each value is computed from.

    A chosen token's KV in layer l comes from its residual stream there, which comes from its stream
    one layer down and from that layer's KV of every token up to itself.
    """
    picked = set(chosen)
    kv = [["exact" if layer < exact_layers else "approximate"] * cached for layer in range(layers)]
    for token in range(cached):
        stream_is_exact = True
        for layer in range(layers):
            if token in picked and layer >= exact_layers:
                kv[layer][token] = "exact" if stream_is_exact else "repaired"
            stream_is_exact = stream_is_exact and all(
                kv[layer][t] == "exact" for t in range(token + 1)
            )
    return kv


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_fidelity_follows_the_dependencies(data):
    layers, cached = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    exact_layers = data.draw(st.integers(0, layers))
    chosen = sorted(data.draw(st.sets(st.integers(0, cached - 1))))
    fidelities = fidelity_map(layers, cached, exact_layers, torch.tensor(chosen, dtype=torch.int64))
    names = [[FIDELITIES[i] for i in row] for row in fidelities]
    assert names == dependency_oracle(layers, cached, exact_layers, chosen)
    spans = spans_of(fidelities)
    cells = [(layer, t) for s in spans for layer in range(*s.layers) for t in range(*s.tokens)]
    assert sorted(cells) == [(layer, t) for layer in range(layers) for t in range(cached)], (
        "each once"
    )
    for s in spans:
        assert all(
            names[layer][t] == s.fidelity for layer in range(*s.layers) for t in range(*s.tokens)
        )


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "phi3"])
def test_what_is_called_exact_is_what_the_receiver_computes(kind):
    """Through a map that is wrong everywhere: exact cells are the receiver's own, all others are
    not."""
    receiver = tiny(kind)
    sender = renamed(receiver)
    wrong = identity(sender, receiver)
    for bias in biases(wrong):
        bias.add_(0.5)
    plan = RepairPlan(sinks=3, tail=6, layers=2, tokens=(10, 11))
    handoff = Bridge(wrong, sender=sender, receiver=receiver).handoff(
        capture(sender, TEXT), TEXT, repair=plan
    )
    own = capture(receiver, TEXT)
    provenance = handoff.provenance
    assert handoff.layers is not None
    assert {provenance.at(layer, t) for layer in range(4) for t in range(handoff.cached)} == set(
        FIDELITIES
    )
    for layer in range(4):
        for token in range(handoff.cached):
            off = max(
                float((handoff.layers[layer][n][token] - own.layers[layer][n][token]).abs().max())
                for n in ("k", "v")
            )
            assert (off < 1e-4) == (provenance.at(layer, token) == "exact"), (layer, token, off)
    with pytest.raises(UsageError):
        provenance.at(0, handoff.cached)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "phi3"])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
@torch.no_grad()
def test_first_layers_are_bit_equal_to_a_full_forward(kind, count):
    model = tiny(kind)
    ids = model.encode(TEXT).ids
    entered = []
    handle = model.layers[count].register_forward_pre_hook(
        lambda _m, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    cache = DynamicCache()
    run_decoder(model, ids[None], cache=cache)
    handle.remove()
    first = first_layers(model, ids, count)
    assert len(first.layers) == count
    assert torch.equal(first.hidden, entered[0][0])
    for layer, (keys, values) in zip(first.layers, cached_layers(cache), strict=False):
        assert torch.equal(layer["k"], keys[0].transpose(0, 1))
        assert torch.equal(layer["v"], values[0].transpose(0, 1))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "phi3"])
def test_first_layers_of_a_handoff_are_bit_equal_to_a_prefill(kind):
    """Sinks and tail go through those layers again, in a forward of other shape; the prefill's
    values stay."""
    receiver = tiny(kind)
    sender = renamed(receiver)
    handoff = Bridge(identity(sender, receiver), sender=sender, receiver=receiver).handoff(
        capture(sender, TEXT), TEXT, repair=RepairPlan(layers=2, tail=20)
    )
    own = first_layers(receiver, handoff.ids[: handoff.cached], 2)
    assert handoff.layers is not None
    for layer, expected in zip(handoff.layers, own.layers, strict=False):
        assert all(torch.equal(layer[n], expected[n]) for n in expected)


def hooks(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.model.modules())


def test_hooks_are_removed_even_on_errors():
    model = wrapped(tiny_causal("llama"))
    ids = model.encode(TEXT).ids
    first_layers(model, ids, 2)
    assert hooks(model) == 0

    class Broken(RuntimeError):
        pass

    def fail(*_):
        raise Broken

    handle = model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(Broken):
        first_layers(model, ids, 2)
    with pytest.raises(Broken):
        capture_batch(model, [model.encode(TEXT)], hidden_layer=3)
    handle.remove()
    assert hooks(model) == 0
    with pytest.raises(ZeroDivisionError), stopped_at(model.layers[0]):
        raise ZeroDivisionError
    assert hooks(model) == 0


@pytest.mark.parametrize("count", [-1, 4, 9])
def test_first_layers_out_of_range(count):
    with pytest.raises(UsageError, match="0 to 3"):
        first_layers(tiny("llama"), prompt_ids("llama"), count)


def test_feature_specs():
    assert [hidden_layer(s) for s in ("none", "embeddings", "hidden:1", "hidden:12")] == [
        None,
        0,
        1,
        12,
    ]
    for bad in ("", "hidden", "hidden:0", "hidden:-1", "hidden:x", "hidden:1:2", "Embeddings"):
        with pytest.raises(UsageError):
            hidden_layer(bad)


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_batches_hold_what_single_captures_hold(kind):
    model = tiny(kind)
    encodings = [model.encode(t) for t in (TEXT[:60], TEXT, TEXT[30:90])]
    batch = capture_batch(model, encodings, hidden_layer=2)
    assert batch.mask.sum(1).tolist() == [len(e) for e in encodings]
    assert batch.hidden is not None
    for row, encoding in enumerate(encodings):
        count = len(encoding)
        snapshot = capture(model, input_ids=encoding.ids)
        for layer in range(4):
            content = snapshot.content(model.rotation, torch.arange(count), layer)
            for name in ("k", "v"):
                assert torch.allclose(
                    batch.layers[layer][name][row, :count], content[name], atol=1e-4
                )
        assert torch.allclose(
            batch.hidden[row, :count], first_layers(model, encoding.ids, 2).hidden, atol=1e-4
        )
