"""Tiny random models and real fast tokenizers, built in memory: every architecture the core claims,
no download.

Weights are drawn wide enough that attention matters: a corrupted cache changes the greedy
continuation.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

import kvbridge

torch.set_num_threads(1)

VOCABULARY = 384
SENTENCES = (
    "The river rose twice that spring, and the mill stood still for nine days.",
    "A ledger lists what was owed: four sacks of barley, two of rye, and one lame horse.",
    "When the bell rang the children ran down to the harbour to see the ships come in.",
    "Nobody knew who had painted the door green, but everybody had an opinion about it.",
    "She counted 12, 48 and 1,024 beads before the lamp went out.",
    "Der Fluss führt im März viel Wasser; die Mühle steht still.",
    "En hiver, le château ferme à 16 h précises.",
    "Snow lay on the northern pass until the eleventh of May, said the mayor's clerk.",
)
TEXT = " ".join(SENTENCES[:4])
UNICODE_TEXT = "Naïve cafés 👩‍👩‍👧 e\u0301tude\tデータを読む\r\nzwei  Wörter 🇫🇷 — 漢字, 123.\n\nEnd"
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SMALL, "head_dim": 16}),
    "qwen2": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 16}),
    "gemma3": (
        "Gemma3Text",
        {
            **SMALL,
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
        },
    ),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 48,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 1024,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
            "tie_word_embeddings": False,
        },
    ),
    "phi3": ("Phi3", {**SMALL, "num_attention_heads": 4}),
    "phi3_sliding": ("Phi3", {**SMALL, "sliding_window": 8}),
    "mistral_sliding": ("Mistral", {**SMALL, "head_dim": 16, "sliding_window": 8}),
    "cohere": ("Cohere", {**SMALL, "logit_scale": 1.0}),
    "glm": ("Glm", {**SMALL, "head_dim": 16}),
    "neox": (
        "GPTNeoX",
        {
            **{k: v for k, v in SMALL.items() if k != "num_key_value_heads"},
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "smollm3": ("SmolLM3", {**SMALL, "no_rope_layers": [1, 1, 0, 1]}),
    "llama_yarn": (
        "Llama",
        {
            **SMALL,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "llama_llama3": (
        "Llama",
        {
            **SMALL,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "llama_linear": (
        "Llama",
        {
            **SMALL,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
}
CAUSAL = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}
EXACT_KINDS = ("llama", "qwen3", "gemma3", "gpt2", "phi3")


def tiny_config(kind: str, **overrides: Any) -> Any:
    """The transformers config of a tiny model of `kind`, a key of CONFIGS."""
    family, settings = CONFIGS[kind]
    return getattr(transformers, f"{family}Config")(**{**settings, **overrides})


def tiny_causal(
    kind: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Any:
    """A fresh transformers model of `kind` with wide random weights, in evaluation mode."""
    family = CONFIGS[kind][0]
    config = tiny_config(kind, **overrides)
    model = getattr(transformers, CAUSAL.get(family, f"{family}ForCausalLM"))(config)
    return randomise(model, seed).to(dtype).eval()


@torch.no_grad()
def randomise(model: Any, seed: int = 0) -> Any:
    """Draws every weight anew, wide, by `seed` (the model is modified and returned)."""
    draw = torch.Generator().manual_seed(seed)
    embeddings = {id(p) for p in model.get_input_embeddings().parameters()}
    width = model.config.get_text_config(decoder=True).hidden_size
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=draw)
        if parameter.ndim < 2:
            parameter.add_(0.1 * noise)
        elif id(parameter) in embeddings:
            parameter.copy_(noise / (width**0.5 if "Gemma" in type(model).__name__ else 1.0))
        else:
            gain = 1.0 if "mlp" in name else 2.0
            parameter.copy_(gain * noise / width**0.5)
    return model


def _trained(kind: str) -> Tokenizer:
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=special)
    elif kind == "metaspace":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[*special, *(f"<0x{byte:02X}>" for byte in range(256))],
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        size = {"bytes": 340, "bytes_other": 376, "bos": 352}[kind]
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
    texts = SENTENCES[4:] if kind == "bytes_other" else SENTENCES
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "bos":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return tokenizer


TOKENIZERS = ("bytes", "bytes_other", "bos", "wordpiece", "metaspace")
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@cache
def _tokenizer_json(kind: str) -> str:
    return _trained(kind).to_str()


def tiny_tokenizer(kind: str = "bytes") -> PreTrainedTokenizerFast:
    """A fresh fast tokenizer of one of TOKENIZERS, trained on SENTENCES; `bos` puts `<s>` before
    every text."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json(kind)),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def wrapped(model: Any, tokenizer: str = "bytes", name: str = "tiny") -> kvbridge.Model:
    """A kvbridge Model around a transformers model and a tokenizer of TOKENIZERS."""
    return kvbridge.wrap(model, tiny_tokenizer(tokenizer), name=name)


@cache
def tiny(kind: str = "llama", seed: int = 0, tokenizer: str = "bytes") -> kvbridge.Model:
    """A tiny kvbridge Model, made once per process: use it, do not modify it."""
    return wrapped(tiny_causal(kind, seed), tokenizer, name=f"tiny-{kind}-{seed}")


def random_texts(count: int, characters: int = 160, seed: int = 0) -> list[str]:
    """Texts of shuffled words of SENTENCES, each different."""
    draw = torch.Generator().manual_seed(seed)
    words = " ".join(SENTENCES).split()
    texts = []
    for _ in range(count):
        order = torch.randint(len(words), (characters // 4,), generator=draw).tolist()
        texts.append(" ".join(words[i] for i in order)[:characters].strip())
    return texts
