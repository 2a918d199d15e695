"""Every architecture that this transformers has as a causal language model and that builds as a tiny
one: it hands over to itself exactly, or it is UnsupportedModel (or RotationMismatch) with its name
and a reason."""

from __future__ import annotations

import pytest
import torch

from kvbridge import Bridge, capture
from kvbridge.errors import LoadError
from tests.model.architectures import architectures, built
from tests.models import TEXT, wrapped

PROMPT = TEXT[:130]
EXACT = {
    "arcee",
    "cohere",
    "gemma3_text",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_neox_japanese",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
}
"""Some that have to work, where this transformers has them."""
BUILT = 100
"""At least as many build: else the settings of `architectures` no longer fit transformers."""


@pytest.mark.parametrize("kind", architectures())
def test_exact_to_itself_or_refused_by_name(kind):
    model = built(kind)
    if model is None:
        assert kind not in EXACT
        pytest.skip("its configuration, or its own forward, does not take these settings")
    try:
        live = wrapped(model, name=kind)
    except LoadError as error:
        refusal = str(error)
        assert kind not in EXACT, refusal
        assert kind in refusal
        assert "\n" not in refusal
        return
    ids = live.encode(PROMPT).ids[None]
    own = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
    )
    bridge = Bridge(None, sender=live, receiver=live)
    for text in (PROMPT, PROMPT[:60]):
        handoff = bridge.handoff(capture(live, text), PROMPT)
        assert handoff.decision.reason == "exact", str(handoff.decision)
        assert torch.equal(handoff.generate(6, do_sample=False), own)


def test_enough_of_them_build():
    kinds = architectures()
    if len(kinds) < 150:
        pytest.skip("an older transformers")
    assert sum(built(kind) is not None for kind in kinds) >= BUILT
