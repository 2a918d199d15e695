"""Tiny random models of every architecture that this transformers has as a causal language model."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models import VOCABULARY

GENERIC: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BY_NAME: dict[str, Any] = {
    "head_dim": 16,
    "ffn_dim": 64,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "d_model": 48,
    "n_embd": 48,
    "n_layer": 2,
    "n_layers": 2,
    "n_head": 4,
    "n_heads": 4,
    "n_inner": 64,
    "n_positions": 512,
    "n_ctx": 512,
    "d_ff": 64,
    "rotary_dim": 8,
    "word_embed_proj_dim": 48,
    "max_seq_len": 512,
    "embedding_size": 48,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "sliding_window": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "num_kv_shared_layers": 0,
    "image_token_id": 5,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 24,
    "mamba_n_groups": 1,
    "conv_dim": 48,
    "lru_width": 48,
    "num_dense_layers": 1,
    "moe_num_experts": 4,
    "query_pre_attn_scalar": 16,
    "mlp_hidden_size": 64,
    "num_buckets": 8,
}
LARGEST = 30_000_000
"""Parameters of the largest model that is built."""


def architectures() -> list[str]:
    """Model types with a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_architecture(kind: str, seed: int = 0) -> Any:
    """A tiny random model of a model type, in evaluation mode. Raises whatever its configuration
    does where these settings do not fit it, and ValueError where it is large all the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config_class = type(transformers.AutoConfig.for_model(kind))
        defaults = config_class()
        text = defaults.get_text_config(decoder=True)
        settings = settings_for(text)
        name = text_name(defaults, text)
        if name is not None:
            settings = {name: {**text.to_dict(), **settings}}
        config = config_class(**settings)
        with torch.device("meta"):
            shape = transformers.AutoModelForCausalLM.from_config(config)
        count = sum(p.numel() for p in shape.parameters())
        if count > LARGEST:
            raise ValueError(f"{count} parameters")
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def text_name(config: Any, text: Any) -> str | None:
    """Under which name a configuration holds its text model's; None where it is the text model's."""
    names = (name for name in type(config).sub_configs if getattr(config, name, None) is text)
    return next(names, None)


def settings_for(config: Any) -> dict[str, Any]:
    """GENERIC and those of BY_NAME that a configuration has."""
    named = {n: v for n, v in BY_NAME.items() if n in config.to_dict() and config.to_dict()[n]}
    return {**{n: v for n, v in GENERIC.items() if hasattr(config, n)}, **named}


@cache
def built(kind: str) -> Any:
    """The tiny model, or None where these settings do not make one that runs at all."""
    try:
        model = tiny_architecture(kind)
        ids = torch.arange(3, 30)[None]
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
    except Exception:  # noqa: BLE001 - whatever a configuration raises, there is no model to try
        return None
    return model
