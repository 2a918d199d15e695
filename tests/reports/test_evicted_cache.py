"""Half of the rows of every head evicted, those with the largest keys kept, as KV-compression
libraries leave a cache: it is no beginning of the prompt."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import kvbridge
from kvbridge.errors import UsageError

TEXT = (
    "Emma has the letter. Anna is in the garden. Peter walked to the mill. Jane is in the church. "
    "Where is Anna? In the"
)


def test_a_pruned_cache_is_refused_by_name():
    model = kvbridge.load("demo:receiver")
    ids = model.encode(TEXT).ids[None]
    with torch.no_grad():
        full = model.model(input_ids=ids, use_cache=True).past_key_values
    pruned = DynamicCache()
    for number, layer in enumerate(full.layers):
        tokens = layer.keys.shape[2]
        score = -layer.keys.norm(dim=-1)
        score[..., :4] = score[..., -8:] = 1e9
        kept = score.topk(tokens // 2, dim=-1).indices.sort(dim=-1).values[..., None]
        kept = kept.expand(-1, -1, -1, layer.keys.shape[-1])
        pruned.update(layer.keys.gather(2, kept), layer.values.gather(2, kept), number)
    with pytest.raises(UsageError, match="of layer 0 is off by"):
        kvbridge.KVSnapshot.from_cache(pruned, model, ids)
