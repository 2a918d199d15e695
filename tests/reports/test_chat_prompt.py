"""A tokenizer that adds BOS with a template that has none: the prompt is the template's own. What a
template cannot render is one line of ours, or a decision."""

from __future__ import annotations

import pytest
import torch

import kvbridge
from tests.models import CHAT_TEMPLATE, tiny_causal, wrapped

MESSAGES = [{"role": "user", "content": "Name a fruit."}]
REFUSING = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{{ messages[0]['content'] }}"
)


def test_chat_prompt():
    model = wrapped(tiny_causal("llama", 0), "bos")
    model.tokenizer.chat_template = CHAT_TEMPLATE
    own = model.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"][0]
    assert int(own[0]) != model.tokenizer.bos_token_id
    snapshot = kvbridge.capture(model, messages=MESSAGES)
    bridge = kvbridge.Bridge(None, sender=model, receiver=model)
    assert torch.equal(bridge.handoff(snapshot, messages=MESSAGES).ids, own)
    model.tokenizer.chat_template = REFUSING
    with pytest.raises(kvbridge.KVBridgeError, match="System role not supported"):
        bridge.handoff(snapshot, messages=[{"role": "system", "content": "Be brief."}])
    with pytest.raises(kvbridge.KVBridgeError, match="at least one message"):
        bridge.handoff(snapshot, messages=[])
    empty = bridge.handoff(snapshot, messages=[{"role": "assistant", "tool_calls": []}])
    assert empty.decision.verdict == "discard"
