"""One row of a left-padded batch after a plain forward without position_ids: its keys stand at
positions moved by the padding."""

from __future__ import annotations

import torch

import kvbridge

LONG = "Emma walked to the harbour and waited for the boat. " * 6
SHORT = "Peter lives near the mill and"


def test_the_rows_are_found_where_they_stand():
    model = kvbridge.load("demo:receiver")
    rows = [model.encode(text).ids for text in (LONG, SHORT)]
    width = max(map(len, rows))
    ids = torch.zeros((2, width), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :] = tokens
        mask[row, width - len(tokens) :] = 1
    with torch.no_grad():
        cache = model.model(input_ids=ids, attention_mask=mask, use_cache=True).past_key_values
    row = [(layer.keys[1:2], layer.values[1:2]) for layer in cache.layers]
    snapshot = kvbridge.KVSnapshot.from_cache(row, model, ids[1], attention_mask=mask[1])
    bridge = kvbridge.Bridge(None, sender=model, receiver=model)
    handoff = bridge.handoff(snapshot, SHORT + " his sister has the")
    native = kvbridge.capture(model, SHORT)
    keys = [
        s.content(model.rotation, torch.arange(len(native)), 0)["k"] for s in (snapshot, native)
    ]
    assert float((keys[0] - keys[1]).abs().max() / keys[1].abs().max()) < 1e-3
    assert handoff.decision.verdict == "discard"
    assert handoff.decision.reason == "positions"
