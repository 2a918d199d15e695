"""Models whose cache cannot be translated token by token are refused, each with the reason and its
name."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import PreTrainedTokenizerFast

import kvbridge
from kvbridge.errors import LoadError, UnsupportedModel
from kvbridge.model.probe import layer_windows
from tests.models import SMALL, tiny_causal, tiny_config, tiny_tokenizer, wrapped

EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
MAMBA = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
SHARED = {
    **SMALL,
    "head_dim": 16,
    "vocab_size_per_layer_input": 384,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
}
LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 4,
}
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "mamba": ("MambaConfig", "MambaForCausalLM", MAMBA, "layer 0 carries recurrent state"),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {**SMALL, **EXPERTS, "mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
        "layer 0 carries recurrent state",
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **SMALL,
            **EXPERTS,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        "layer 0 carries recurrent state",
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {**SMALL, "layer_types": ["full_attention", "conv"] * 2},
        "layer 1 carries convolution state",
    ),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            **SMALL,
            "mamba_n_heads": 4,
            "mamba_d_head": 24,
            "mamba_d_state": 4,
            "mamba_n_groups": 1,
            "mamba_d_ssm": 96,
        },
        "layer 0 carries recurrent state beside its KV",
    ),
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {**SHARED, "global_head_dim": 16},
        "layer 2 shares another layer's KV",
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            **SHARED,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        "layer 2 shares another layer's KV",
    ),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT, "caches a latent"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", LATENT, "caches a latent"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(kind):
    config_class, model_class, settings, why = REFUSED[kind]
    model = getattr(transformers, model_class)(
        getattr(transformers, config_class)(**settings)
    ).eval()
    with pytest.raises(UnsupportedModel, match=why) as refusal:
        wrapped(model, name=f"tiny-{kind}")
    assert f"tiny-{kind}" in str(refusal.value)


def test_refused_by_config_alone():
    config = transformers.Qwen3NextConfig(**REFUSED["qwen3_next"][2])
    with pytest.raises(UnsupportedModel, match="some/model: layer 0 carries recurrent state"):
        layer_windows(config, "some/model")


def test_unknown_layer_kinds_are_refused_not_guessed(monkeypatch):
    monkeypatch.setattr(
        "kvbridge.model.probe.get_layer_types_and_kwargs",
        lambda _: (["full_attention", "new_kind"], [{}, {}]),
    )
    with pytest.raises(UnsupportedModel, match="layer 1 is of kind 'new_kind'"):
        layer_windows(tiny_config("llama"), "x")


def test_windows_are_read_from_the_config():
    assert layer_windows(tiny_config("gemma3"), "x") == [8, None, 8, None]
    assert layer_windows(tiny_config("phi3_sliding"), "x") == [8] * 4
    assert layer_windows(tiny_config("llama"), "x") == [None] * 4


def test_slow_tokenizers_are_refused():
    tokenizer = tiny_tokenizer()

    class Slow(PreTrainedTokenizerFast):
        is_fast = False

    slow = Slow(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(UnsupportedModel, match="fast tokenizer"):
        kvbridge.wrap(tiny_causal("llama"), slow, name="x")


def test_missing_models_say_what_was_expected(tmp_path):
    for source in (str(tmp_path), "demo:nobody"):
        with pytest.raises(LoadError, match="expected"):
            kvbridge.load(source)


def test_hooks_of_a_refused_model_are_removed():
    config_class, model_class, settings, _ = REFUSED["deepseek_v3"]
    model = getattr(transformers, model_class)(
        getattr(transformers, config_class)(**settings)
    ).eval()
    with pytest.raises(UnsupportedModel):
        wrapped(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
