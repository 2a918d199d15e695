"""K/V of first layers, stopped where they are cached, against whole forwards of the same model."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvbridge import capture
from kvbridge.cache.features import early_kv, noted
from kvbridge.cache.prefill import run_decoder
from kvbridge.cache.snapshot import LayerKV, build_cache
from kvbridge.errors import UsageError
from kvbridge.model.model import Model
from kvbridge.model.probe import cached_layers
from tests.models import EXACT_KINDS, TEXT, tiny, tiny_causal, wrapped

KINDS = (*EXACT_KINDS, "mistral_sliding", "neox", "smollm3")
LENGTH, NEW = 40, 11


def rows_of(cache: DynamicCache, layer: int) -> LayerKV:
    keys, values = cached_layers(cache)[layer]
    return {"k": keys[0].transpose(0, 1), "v": values[0].transpose(0, 1)}


def finished(model: Model) -> tuple[list[int], list]:
    """Numbers of the layers whose forward came to its end, and the hooks that note them."""
    ended: list[int] = []
    return ended, [
        m.register_forward_hook(lambda *_, i=i: ended.append(i)) for i, m in enumerate(model.layers)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_layer_needs_no_layer(kind):
    """Any sample of tokens at its own positions, bit for bit as a whole forward of them caches
    it."""
    model = tiny(kind)
    positions = torch.tensor([0, 1, 5, 17, 30, 39])
    ids = model.encode(TEXT).ids[positions]
    cache = DynamicCache()
    with torch.no_grad():
        run_decoder(model, ids[None], cache=cache, position_ids=positions[None])
    ended, hooks = finished(model)
    (rows,) = early_kv(model, ids, positions)
    for hook in hooks:
        hook.remove()
    assert ended == []
    for name, expected in rows_of(cache, 0).items():
        assert torch.equal(rows[name], expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole", [1, 2, 3])
def test_early_layers_over_a_past_are_a_whole_forwards(kind, whole):
    """Bit for bit the last tokens' rows of a forward over every layer's past (of a sliding layer
    those that it keeps), and the prompt's own rows up to rounding; no layer but the first `whole`
    is run to its end."""
    model = tiny(kind)
    snapshot = capture(model, input_ids=model.encode(TEXT).ids[:LENGTH])
    before = [{n: t[: LENGTH - NEW] for n, t in x.items()} for x in snapshot.layers]
    rows = torch.arange(LENGTH - NEW, LENGTH)
    cache = build_cache(model, before)
    with torch.no_grad():
        run_decoder(
            model,
            snapshot.token_ids[rows][None],
            cache=cache,
            position_ids=rows[None],
            attention_mask=torch.ones((1, LENGTH), dtype=torch.int64),
        )
    copies = [{n: t.clone() for n, t in x.items()} for x in before[:whole]]
    ended, hooks = finished(model)
    again = early_kv(model, snapshot.token_ids[rows], rows, before[:whole])
    for hook in hooks:
        hook.remove()
    assert ended == list(range(whole))
    assert len(again) == whole + 1
    for layer, own in enumerate(again):
        stored = rows_of(cache, layer)
        for name, value in own.items():
            kept = min(NEW, len(stored[name]))
            assert value.shape == snapshot.layers[layer][name][rows].shape
            assert torch.equal(value[-kept:], stored[name][-kept:])
            assert torch.allclose(value, snapshot.layers[layer][name][rows], atol=1e-4)
    assert all(
        torch.equal(a[n], b[n]) for a, b in zip(copies, before[:whole], strict=True) for n in a
    )


def test_a_model_of_one_layer():
    model = wrapped(tiny_causal("llama", num_hidden_layers=1))
    snapshot = capture(model, TEXT)
    (rows,) = early_kv(model, snapshot.token_ids, snapshot.positions)
    assert all(torch.equal(rows[n], t) for n, t in snapshot.layers[0].items())
    with pytest.raises(UsageError, match="fewer than 1 layers"):
        early_kv(model, snapshot.token_ids, snapshot.positions, snapshot.layers)


def test_rows_of_other_tokens_are_refused():
    model = tiny("llama")
    snapshot = capture(model, TEXT)
    rows = torch.arange(20, 30)
    with pytest.raises(UsageError, match=r"20 tokens before, found \[19\]"):
        early_kv(
            model,
            snapshot.token_ids[rows],
            rows,
            [{n: t[:19] for n, t in snapshot.layers[0].items()}],
        )


def test_a_noted_cache_is_ordinary_afterwards():
    model, cache = tiny("gemma3"), DynamicCache()
    ids = model.encode(TEXT).ids[None, :LENGTH]
    with torch.no_grad(), noted(cache) as rows:
        run_decoder(model, ids, cache=cache)
    assert [len(x["k"]) for x in rows] == [LENGTH] * 4
    assert vars(cache).keys() == vars(DynamicCache()).keys()
    with pytest.raises(ZeroDivisionError), noted(cache):
        raise ZeroDivisionError
    assert vars(cache).keys() == vars(DynamicCache()).keys()
