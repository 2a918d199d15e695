"""Speculative decoding after an exact handoff: the model's own greedy tokens, or a refusal."""

from __future__ import annotations

import pytest
import torch

import kvbridge
from kvbridge.errors import UsageError
from tests.models import TEXT, tiny


def test_drafting_over_a_filled_cache_is_refused_or_equal():
    model, small = tiny("llama"), tiny("llama", seed=4)
    handoff = kvbridge.Bridge(None, sender=model, receiver=model).handoff(
        kvbridge.capture(model, TEXT), TEXT
    )
    ids = handoff.ids[None]
    own = model.model.generate(ids, max_new_tokens=16, do_sample=False)
    assert torch.equal(own, handoff.generate(16, do_sample=False))
    for name, value in (("prompt_lookup_num_tokens", 3), ("assistant_model", small.model)):
        with pytest.raises(UsageError, match=name):
            handoff.generate(16, do_sample=False, **{name: value})
