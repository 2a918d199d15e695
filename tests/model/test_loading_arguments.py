"""Models that cannot be run here as a whole, and attention that takes no dense mask."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import kvbridge
from kvbridge.engines.transformers import TransformersEngine
from kvbridge.errors import UnsupportedModel, UsageError
from tests.models import TEXT, tiny, tiny_causal, tiny_config, tiny_tokenizer, wrapped

DENSE_NEEDED = ("flex_attention", "paged|eager", "flash_attention_2")


def _set(model, name):
    """Without the check that the implementation's package is installed."""
    model.config._attn_implementation_internal = name
    return model


@pytest.mark.parametrize("name", DENSE_NEEDED)
def test_attention_without_dense_masks_is_refused_when_wrapped(name):
    with pytest.raises(UnsupportedModel, match="dense mask") as refused:
        wrapped(_set(tiny_causal("llama"), name))
    assert name in str(refused.value)


@pytest.mark.parametrize("name", DENSE_NEEDED)
def test_attention_without_dense_masks_is_refused_when_set_later(name):
    model = wrapped(tiny_causal("llama"))
    part = kvbridge.capture(model, TEXT[:60])
    bridge = kvbridge.Bridge(None, sender=model, receiver=model)
    before = bridge.handoff(part, TEXT[:130])
    _set(model.model, name)
    after = bridge.handoff(part, TEXT[:130])
    assert after.decision.reason == "contract_mismatch"
    assert "attention implementation" in after.decision.detail
    layers = [{n: t.clone() for n, t in layer.items()} for layer in part.layers]
    with pytest.raises(UsageError, match=name.replace("|", r"\|")):
        TransformersEngine(model).repair(part.token_ids, layers, torch.tensor([1]))
    with pytest.raises(UsageError, match="dense mask"):
        before.generate(3)


def test_eager_and_registered_attention_are_taken():
    AttentionInterface.register("mine", sdpa_attention_forward)
    AttentionMaskInterface.register("mine", sdpa_mask)
    for name in ("eager", "mine"):
        model = tiny_causal("llama")
        model.set_attn_implementation(name)
        live = wrapped(model)
        bridge = kvbridge.Bridge(None, sender=live, receiver=live)
        handoff = bridge.handoff(kvbridge.capture(live, TEXT[:60]), TEXT[:130])
        assert handoff.decision.reason == "exact"


def test_weights_that_are_not_in_memory():
    model = tiny_causal("llama")
    with pytest.raises(UnsupportedModel, match="not in memory"):
        wrapped(model.to("meta"))
    partly = tiny_causal("llama")
    partly.model.layers[2].to("meta")
    with pytest.raises(UnsupportedModel, match="not in memory"):
        wrapped(partly)


def test_models_without_a_head_and_with_an_encoder():
    with pytest.raises(UnsupportedModel, match="no language-model head"):
        wrapped(transformers.LlamaModel(tiny_config("llama")).eval())
    config = transformers.T5Config(
        vocab_size=384, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16
    )
    with pytest.raises(UnsupportedModel, match="an encoder"):
        wrapped(transformers.T5ForConditionalGeneration(config).eval())
    clip = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(UnsupportedModel, match="no language-model head"):
        wrapped(transformers.CLIPVisionModel(clip).eval())


def test_tied_heads_are_taken():
    live = wrapped(tiny_causal("llama", tie_word_embeddings=True))
    handoff = kvbridge.Bridge(None, sender=live, receiver=live).handoff(
        kvbridge.capture(live, TEXT[:60]), TEXT[:130]
    )
    assert handoff.decision.reason == "exact"


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "nowhere", "", "meta", "cpu:x", 3, None])
def test_devices_that_are_not_there(device):
    with pytest.raises(UsageError, match="expected a device"):
        kvbridge.load("demo:sender", device=device)


@pytest.mark.parametrize("dtype", [torch.int8, "int8", "many", 3, "auto"])
def test_dtypes_that_weights_do_not_have(dtype):
    with pytest.raises(UsageError, match="expected a dtype"):
        kvbridge.load("demo:sender", dtype=dtype)


def test_another_models_tokenizer():
    model = tiny_causal("llama", vocab_size=100)
    live = kvbridge.wrap(model, tiny_tokenizer())
    with pytest.raises(UsageError, match="this tokenizer is not"):
        kvbridge.capture(live, TEXT)
    for tokenizer in (None, "a name", tiny_tokenizer().backend_tokenizer):
        with pytest.raises(UnsupportedModel, match="fast tokenizer"):
            kvbridge.wrap(tiny_causal("llama"), tokenizer)


def test_another_models_cache():
    ids = torch.arange(20)
    cache = kvbridge.capture(tiny("gpt2"), input_ids=ids).to_cache(tiny("gpt2"))
    with pytest.raises(UsageError):
        kvbridge.KVSnapshot.from_cache(cache, tiny("llama"), ids)
