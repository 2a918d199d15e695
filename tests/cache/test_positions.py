"""Where a cache's rows stand: found from what transformers left, against its own `generate` and
plain forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvbridge import Bridge, KVSnapshot, capture
from kvbridge.errors import UsageError
from kvbridge.model.probe import cache_argument
from tests.cache.spoilt import SPOILT, pairs_of
from tests.handoff.handoffs import assert_exact, continued, identity, renamed
from tests.models import TEXT, tiny, tiny_causal, wrapped

FAMILIES = ("llama", "gpt2", "gemma3", "qwen2", "neox", "smollm3", "glm", "llama_yarn")
LONG, SHORT = TEXT[:220], TEXT[60:170]
MORE = torch.tensor([40, 41, 42])


def batch_of(model) -> tuple[Tensor, Tensor]:
    """Ids and mask `[2, tokens]` of a long prompt and a short one, padded on the left."""
    rows = [model.encode(text).ids for text in (LONG, SHORT)]
    width = max(map(len, rows))
    ids = torch.zeros((2, width), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :] = tokens
        mask[row, width - len(tokens) :] = 1
    return ids, mask


def second_row(cache: Any) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys[1:2], layer.values[1:2]) for layer in cache.layers]


def to_itself(model, snapshot: KVSnapshot, ids: Tensor):
    return Bridge(None, sender=model, receiver=model).handoff(snapshot, input_ids=ids)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_row_of_generate_goes_on_as_generate_would(kind):
    """`generate` counts positions from the first real token: the row is that of a lone prompt."""
    model = tiny(kind)
    ids, mask = batch_of(model)
    cache = DynamicCache()
    out = model.model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
        **cache_argument(model.model, cache),
    )
    whole = torch.cat((mask[1], torch.ones(6, dtype=torch.int64)))
    snapshot = KVSnapshot.from_cache(
        second_row(cache), model, out.sequences[1], attention_mask=whole
    )
    assert torch.equal(snapshot.positions, torch.arange(len(snapshot)))
    handoff = to_itself(model, snapshot, out.sequences[1][whole.bool()])
    assert handoff.provenance.fidelity == "exact"
    assert_exact(handoff, continued(model, out.sequences[1][whole.bool()]))


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("told", [True, False])
def test_a_row_of_a_plain_forward_stands_behind_its_padding(kind, told):
    """Without position_ids the padding counts: found, true in content, and never exact."""
    model = tiny(kind)
    ids, mask = batch_of(model)
    rows = [(keys[1:2], values[1:2]) for keys, values in pairs_of(model, ids, attention_mask=mask)]
    pads = int((mask[1] == 0).sum())
    arguments = {"position_ids": torch.arange(ids.shape[1])[None]} if told else {}
    snapshot = KVSnapshot.from_cache(rows, model, ids[1], attention_mask=mask[1], **arguments)
    assert torch.equal(snapshot.positions, torch.arange(pads, ids.shape[1]))
    native = capture(model, SHORT)
    assert snapshot.text_digest == native.text_digest
    if model.rotation.module is not None:
        some = torch.arange(len(native))
        for name, content in snapshot.content(model.rotation, some, 0).items():
            expected = native.content(model.rotation, some, 0)[name]
            assert torch.allclose(content, expected, atol=1e-4)
    handoff = to_itself(model, snapshot, torch.cat((snapshot.token_ids, MORE)))
    assert handoff.decision.reason == "positions"


@pytest.mark.parametrize("kind", ["llama", "gemma3", "neox"])
def test_moved_rows_are_translated_as_content(kind):
    """Across models RoPE is taken off where the rows truly stand: the same translation as from a
    prompt of its own, up to rounding."""
    receiver = tiny(kind)
    sender = renamed(receiver)
    ids = sender.encode(SHORT).ids
    places = torch.arange(7, 7 + len(ids))
    moved = KVSnapshot.from_cache(pairs_of(sender, ids, position_ids=places[None]), sender, ids)
    assert torch.equal(moved.positions, places)
    bridge = Bridge(identity(sender, receiver), sender=sender, receiver=receiver)
    handoff = bridge.handoff(moved, SHORT)
    assert handoff.decision.verdict == "use_approximate"
    assert handoff.provenance.fidelity != "exact"
    expected = continued(receiver, receiver.encode(SHORT).ids)
    assert_exact(handoff, expected)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("step", [1, 7, 64])
def test_a_prompt_that_grew_is_taken(kind, step):
    model = tiny(kind)
    ids = model.encode(LONG).ids
    cache = DynamicCache()
    with torch.no_grad():
        for start in range(0, len(ids), step):
            piece = ids[None, start : start + step]
            model.model(input_ids=piece, **cache_argument(model.model, cache))
    handoff = to_itself(model, KVSnapshot.from_cache(cache, model, ids), ids)
    assert handoff.provenance.fidelity == "exact"
    assert_exact(handoff, continued(model, ids))


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("way", ["packed", "packed, told", "two prompts", "second of a pack"])
def test_several_prompts_are_not_one(kind, way):
    model = tiny(kind)
    ids = model.encode(LONG).ids
    cache, given, arguments = SPOILT[way](model, pairs_of(model, ids), ids)
    with pytest.raises(UsageError):
        KVSnapshot.from_cache(cache, model, given, **arguments)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_positions_of_a_moved_prompt_are_searched(kind):
    model = tiny(kind)
    ids = model.encode(SHORT).ids
    for first in (1, 300):
        places = torch.arange(first, first + len(ids))
        cache = pairs_of(model, ids, position_ids=places[None])
        assert torch.equal(KVSnapshot.from_cache(cache, model, ids).positions, places)


def test_one_repeated_token_at_other_positions_is_not_the_prompts():
    """Token and position agree, and what stood before does not: ids alone do not tell."""
    model = tiny("llama")
    ids = model.encode(SHORT).ids[5].repeat(40)
    places = torch.arange(3, 43)
    cache = pairs_of(model, ids, position_ids=places[None])
    snapshot = KVSnapshot.from_cache(cache, model, ids, position_ids=places)
    handoff = to_itself(model, snapshot, torch.cat((ids, ids)))
    assert handoff.decision.reason == "positions"


def test_positions_that_are_not_the_rows_own_are_refused():
    model = tiny("llama")
    ids = model.encode(SHORT).ids
    cache = pairs_of(model, ids)
    with pytest.raises(UsageError, match="at position 1;"):
        KVSnapshot.from_cache(cache, model, ids, position_ids=torch.arange(1, 1 + len(ids)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_ids", torch.zeros((2, 4), dtype=torch.int64)),
        ("position_ids", torch.arange(3)),
        ("position_ids", [0, 1, 2]),
        ("attention_mask", torch.ones((2, 90))),
        ("attention_mask", torch.ones(3)),
        ("attention_mask", [1, 1, 1]),
    ],
    ids=str,
)
def test_masks_and_positions_of_another_shape_are_refused(name, value):
    model = tiny("llama")
    ids = model.encode(SHORT).ids
    with pytest.raises(UsageError, match=f"expected .*{name}"):
        KVSnapshot.from_cache(pairs_of(model, ids), model, ids, **{name: value})


def test_a_first_layer_without_rope_leaves_the_positions_to_the_next():
    """Layer 0 fits every position; the second decides for the plain forward's."""
    model = wrapped(tiny_causal("smollm3", no_rope_layers=[0, 1, 1, 0]))
    ids, mask = batch_of(model)
    rows = [(keys[1:2], values[1:2]) for keys, values in pairs_of(model, ids, attention_mask=mask)]
    snapshot = KVSnapshot.from_cache(rows, model, ids[1], attention_mask=mask[1])
    assert int(snapshot.positions[0]) == int((mask[1] == 0).sum())
