"""Recorded queries against what the model hands to its own attention."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import Olmo2Config, Olmo2ForCausalLM

from kvbridge.model.attention import attention_of, attention_probe
from kvbridge.model.queries import recorded_queries
from tests.models import CONFIGS, SMALL, TEXT, randomise, tiny, tiny_causal, wrapped


def model_of(kind):
    """A tiny model; beside CONFIGS one whose scaling is not its width's root, and one that
    normalises all heads at once."""
    if kind == "scaled":
        return wrapped(tiny_causal("gemma3", query_pre_attn_scalar=64))
    if kind == "olmo2":
        return wrapped(randomise(Olmo2ForCausalLM(Olmo2Config(**SMALL)).eval()))
    return tiny(kind)


@torch.no_grad()
@pytest.mark.parametrize("kind", [*CONFIGS, "scaled", "olmo2"])
def test_queries_are_what_attention_sees(kind):
    model = model_of(kind)
    seen = {}
    ids = model.encode(TEXT).ids[
        None, : model.geometry.attention_heads
    ]  # as many tokens as heads: axes are not guessed

    def observe(layer, query, key, value, mask, scaling):
        seen[layer] = query[0].transpose(0, 1).float() * scaling

    with recorded_queries(model) as queries, attention_probe(model.model, observe):
        model.decoder(input_ids=ids)
    rows = torch.arange(ids.shape[1])
    assert sorted(seen) == list(range(len(model.layers)))
    for layer, expected in seen.items():
        recorded = queries.at(layer, rows, rows)
        assert recorded is not None
        assert torch.allclose(recorded, expected, atol=1e-4, rtol=1e-4), f"layer {layer}"
        assert torch.equal(queries.at(layer, rows[-1:], rows[-1:])[0], recorded[-1])


@torch.no_grad()
def test_hooks_end_and_other_threads_are_not_recorded():
    model = tiny("llama")
    ids = model.encode(TEXT).ids[None, :6]
    with recorded_queries(model) as queries:
        other = threading.Thread(target=lambda: model.decoder(input_ids=ids))
        other.start()
        other.join()
        assert not queries.projected
    model.decoder(input_ids=ids)
    assert not queries.projected
    assert not any(m._forward_hooks for m in model.model.modules())


@torch.no_grad()
def test_attention_that_is_not_a_plain_softmax_is_left_out():
    model = tiny("llama")
    attention = attention_of(model.layers[1])
    attention.attn_logit_softcapping = 30.0
    try:
        with recorded_queries(model) as queries:
            model.decoder(input_ids=model.encode(TEXT).ids[None, :6])
    finally:
        del attention.attn_logit_softcapping
    assert sorted(queries.projected) == [0, 2, 3]
    assert queries.at(1, torch.tensor([0]), torch.tensor([0])) is None
