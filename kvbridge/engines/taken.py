"""Which settings and arguments of `transformers.generate` a handoff takes, and which it refuses.

A setting that is in none of these tables, of a newer transformers, is refused by name; a test fails
until it has its line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from kvbridge.engines.values import (
    AMOUNT,
    BIASES,
    CALLABLE,
    CALLABLES,
    COUNT,
    DECAY,
    FLAG,
    FRACTION,
    LISTED,
    NUMBER,
    POSITIVE,
    SHARE,
    STREAMER,
    STRINGS,
    TOKEN,
    TOKENIZER,
    TOKENS,
    WATERMARK,
    WHATEVER,
    WORDS,
    Kind,
)

SETTINGS: dict[str, Kind] = {
    "max_length": COUNT,
    "max_new_tokens": COUNT,
    "min_length": AMOUNT,
    "min_new_tokens": AMOUNT,
    "early_stopping": WHATEVER,
    "max_time": POSITIVE,
    "stop_strings": STRINGS,
    "do_sample": FLAG,
    "num_beams": COUNT,
    "use_cache": FLAG,
    "cache_implementation": WHATEVER,
    "cache_config": WHATEVER,
    "max_cache_len": COUNT,
    "temperature": POSITIVE,
    "top_k": AMOUNT,
    "top_p": SHARE,
    "min_p": SHARE,
    "top_h": FRACTION,
    "typical_p": FRACTION,
    "epsilon_cutoff": SHARE,
    "eta_cutoff": SHARE,
    "repetition_penalty": POSITIVE,
    "encoder_repetition_penalty": POSITIVE,
    "length_penalty": NUMBER,
    "no_repeat_ngram_size": AMOUNT,
    "encoder_no_repeat_ngram_size": AMOUNT,
    "bad_words_ids": WORDS,
    "renormalize_logits": FLAG,
    "forced_bos_token_id": TOKEN,
    "forced_eos_token_id": TOKENS,
    "remove_invalid_values": FLAG,
    "exponential_decay_length_penalty": DECAY,
    "suppress_tokens": LISTED,
    "begin_suppress_tokens": LISTED,
    "sequence_bias": BIASES,
    "guidance_scale": NUMBER,
    "watermarking_config": WATERMARK,
    "num_return_sequences": COUNT,
    "output_attentions": FLAG,
    "output_hidden_states": FLAG,
    "output_scores": FLAG,
    "output_logits": FLAG,
    "return_dict_in_generate": FLAG,
    "pad_token_id": TOKEN,
    "bos_token_id": TOKEN,
    "eos_token_id": TOKENS,
    "decoder_start_token_id": TOKEN,
    "num_assistant_tokens": WHATEVER,
    "num_assistant_tokens_schedule": WHATEVER,
    "assistant_confidence_threshold": WHATEVER,
    "max_matching_ngram_size": WHATEVER,
    "assistant_lookbehind": WHATEVER,
    "target_lookbehind": WHATEVER,
    "assistant_ensemble_weight": WHATEVER,
    "compile_config": WHATEVER,
    "disable_compile": FLAG,
    "continuous_batching_config": WHATEVER,
    "low_memory": WHATEVER,
    "diversity_penalty": WHATEVER,
    "prefill_chunk_size": COUNT,
    "transformers_version": WHATEVER,
}
"""Fields of a GenerationConfig that a handoff takes, and what each may hold. None is always
allowed."""

ARGUMENTS: dict[str, Kind] = {
    "generation_config": WHATEVER,
    "logits_processor": CALLABLES,
    "stopping_criteria": CALLABLES,
    "prefix_allowed_tokens_fn": CALLABLE,
    "streamer": STREAMER,
    "negative_prompt_ids": WHATEVER,
    "negative_prompt_attention_mask": WHATEVER,
    "tokenizer": TOKENIZER,
    "trust_remote_code": FLAG,
}
"""Further arguments of `generate` that a handoff takes."""

DECIDED = (
    "input_ids",
    "inputs",
    "inputs_embeds",
    "attention_mask",
    "past_key_values",
    "cache",
    "position_ids",
)
"""Arguments that the handoff gives itself."""


@dataclass(frozen=True)
class Refusal:
    """A setting that a handoff does not take: `why`, in words, where `applies` to its value and to
    the whole configuration. `instead`: what to give to undo a default, by name."""

    why: str
    applies: Callable[[Any, GenerationConfig], bool] = lambda value, _: value is not None
    instead: str = "None"


def _true(value: Any, _: GenerationConfig) -> bool:
    return bool(value)


def _recorded(value: Any, config: GenerationConfig) -> bool:
    # Without the dictionary nothing of it is returned, and tokens do not depend on it.
    return bool(value) and bool(config.return_dict_in_generate)


def _contrastive(value: Any, config: GenerationConfig) -> bool:
    return bool(value) and not config.do_sample and config.num_beams in (None, 1)


_DRAFTS = "drafted tokens are checked over the whole prompt, which the cache holds already"
_HUB = "transformers loads this decoding from the Hub, and it reads the whole prompt"
REFUSED: dict[str, Refusal] = {
    "use_cache": Refusal("a handoff is a cache", lambda value, _: value is False, "True"),
    "cache_implementation": Refusal(
        "it asks for another cache, which would have to read the whole prompt",
        # "hybrid" is what transformers itself takes for unset.
        lambda value, _: value not in (None, "dynamic", "hybrid"),
    ),
    "token_healing": Refusal("it takes back tokens that the cache holds already", _true),
    "use_mtp": Refusal(_DRAFTS, _true),
    "prompt_lookup_num_tokens": Refusal(_DRAFTS),
    "assistant_early_exit": Refusal(_DRAFTS),
    "speculation_type": Refusal(_DRAFTS),
    "assistant_model": Refusal(_DRAFTS),
    "assistant_tokenizer": Refusal(_DRAFTS),
    "is_assistant": Refusal("transformers sets it on models that draft for another", _true),
    "penalty_alpha": Refusal(_HUB, _contrastive),
    "dola_layers": Refusal(_HUB),
    "num_beam_groups": Refusal(_HUB, lambda value, _: value not in (None, 1)),
    "constraints": Refusal(_HUB),
    "force_words_ids": Refusal(_HUB),
    "custom_generate": Refusal("whether it goes on from a filled cache cannot be known"),
    "synced_gpus": Refusal("a handoff is of one process", _true),
    "output_attentions": Refusal("the prompt's are not computed again", _recorded, "False"),
    "output_hidden_states": Refusal("the prompt's are not computed again", _recorded, "False"),
}
"""What a handoff does not take, and why. All of these are ignored where they are unset."""

ONE_BY_ONE = (
    "min_length",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "guidance_scale",
    "bad_words_ids",
    "sequence_bias",
    "watermarking_config",
)
"""Settings that read the prompt's tokens: in a batch they would read its padding, too."""
ONE_BY_ONE_OFF = {"encoder_repetition_penalty": 1.0, "guidance_scale": 1.0}
"""Values, besides None and 0, with which those do nothing."""
