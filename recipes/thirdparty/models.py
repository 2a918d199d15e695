"""Two GGUF files made into transformers folders: float32 safetensors, config, fast tokenizer.

The configurations are written out rather than derived: the files are pinned by their digests, and
what a GGUF does not say (Gemma's local RoPE base, its layer pattern) is then visible here. Float32,
because a dequantised weight, scale times integer plus offset, does not fit into the eight
significant bits of bfloat16. The weights are bit for bit those of ``from_pretrained(gguf_file=)``,
which needs accelerate and reads the file four times as long.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
)

from kvbridge.errors import CorruptFile, LoadError

__all__ = ["GEMMA", "GGUF_REQUIREMENT", "MODELS", "SMOLLM2", "GGUFModel", "check", "convert"]

GGUF_REQUIREMENT = "gguf==0.19.0"

# GGUF name -> transformers name; the same for every architecture except the norms around attention
# and MLP.
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}


@dataclass(frozen=True)
class GGUFModel:
    """What is known of a model beside its GGUF file, and what it must achieve once converted."""

    folder: str
    config: PreTrainedConfig
    norms: Mapping[str, str]
    interleaved_rope: bool  # rows of q and k are permuted for llama.cpp's interleaved RoPE
    norm_offset: float  # what GGUF adds to norm weights
    adds_bos: bool
    max_loss: float  # nats per token on PROSE; measured 3.01 and 2.88

    def name(self, gguf_name: str) -> str:
        """The transformers name of a tensor. Raises CorruptFile for one it does not know."""
        parts = gguf_name.removesuffix(".weight").split(".")
        if len(parts) == 1 and parts[0] in _OUTER:
            return f"{_OUTER[parts[0]]}.weight"
        known = {**_BLOCK, **self.norms}
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in known:
            return f"model.layers.{parts[1]}.{known[parts[2]]}.weight"
        raise CorruptFile(f"tensor {gguf_name!r} is not one of a {self.config.model_type} model")

    def weight(self, gguf_name: str, values: np.ndarray) -> Tensor:
        """A dequantised GGUF tensor `[out, in]` or `[in]` in the convention of transformers,
        float32."""
        kind = gguf_name.removesuffix(".weight").split(".")[-1]
        if kind.endswith("norm"):
            values = values - np.float32(self.norm_offset)
        elif self.interleaved_rope and kind in ("attn_q", "attn_k"):
            heads = (
                self.config.num_attention_heads
                if kind == "attn_q"
                else self.config.num_key_value_heads
            )
            values = (
                values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
            )
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


SMOLLM2 = GGUFModel(
    folder="smollm2-135m-instruct",
    config=LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="float32",
    ),
    norms={"ffn_norm": "post_attention_layernorm"},
    interleaved_rope=True,
    norm_offset=0.0,
    adds_bos=False,
    max_loss=3.3,
)

GEMMA = GGUFModel(
    folder="gemma-3-270m",
    config=Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
        sliding_window=512,
        layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3,
        query_pre_attn_scalar=256,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    ),
    norms={
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    interleaved_rope=False,
    norm_offset=1.0,
    adds_bos=True,
    max_loss=3.2,
)

MODELS = {model.folder: model for model in (SMOLLM2, GEMMA)}


def convert(model: GGUFModel, gguf: Path, folder: Path) -> None:
    """Writes config, weights and tokenizer into the existing ``folder``. Raises LoadError without
    gguf."""
    try:
        from gguf import GGUFReader, dequantize
    except ModuleNotFoundError as error:
        raise LoadError(
            f"converting {gguf.name} needs a package: pip install {GGUF_REQUIREMENT}"
        ) from error
    tensors = {
        model.name(tensor.name): model.weight(
            tensor.name, dequantize(tensor.data, tensor.tensor_type)
        )
        for tensor in GGUFReader(gguf).tensors
    }
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    model.config.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = model.config.max_position_embeddings
    if model is SMOLLM2:
        # The GGUF names SmolLM's pre-tokenizer, "smollm": digits one by one before the byte-level
        # pattern.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    tokenizer.save_pretrained(folder)


PROSE = (
    "The old lighthouse stood at the end of a long stone pier. For more than a hundred years its "
    "keeper"
    " had climbed the stairs every evening to light the lamp, and every morning he had climbed them"
    " again to put it out. When the harbour was closed to large ships, the town council decided"
    " that the"
    " light was no longer needed. The last keeper packed his books into three wooden boxes,"
    " locked the"
    " door, and gave the key to the mayor. He then walked back along the pier without turning"
    " round,"
    " although several of the children who had come to say goodbye called his name."
    "\n\nIn 1987 the tower was sold for 1,250 pounds to a retired teacher, who spent the next two "
    "years"
    " repairing the windows and the roof. She opened a small museum there, and in the summer she"
    " sold"
    " tea and cakes to visitors."
)


def check(model: GGUFModel, folder: Path) -> float:
    """Loss of the model on PROSE in nats per token. Raises CorruptFile if it or the tokenizer is
    wrong."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded: Any = tokenizer(PROSE, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    first = int(model.adds_bos)
    if (ids[0] == model.config.bos_token_id) is not model.adds_bos:
        raise CorruptFile(
            f"{folder}: the tokenizer should {'' if first else 'not '}begin with a BOS token"
        )
    if (
        tokenizer.decode(ids[first:]) != PROSE
        or "".join(PROSE[a:b] for a, b in offsets[first:]) != PROSE
    ):
        raise CorruptFile(
            f"{folder}: the tokenizer does not give a plain text back, or its offsets do not "
            "cover it"
        )
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = torch.tensor([ids])
    with torch.no_grad():
        loss = float(network(input_ids=batch, labels=batch).loss)
    if not loss <= model.max_loss:
        raise CorruptFile(
            f"{folder}: the loss on plain English should be at most {model.max_loss} nats per "
            "token, but is"
            f" {loss:.2f}; run again with the package versions of constraints.txt"
        )
    return loss
