"""What `generate` is asked for, and whether it can go on from a handoff's cache.

Each setting comes from its argument, else from `generation_config=`, else from the model's own
generation config, as in transformers. A setting is checked here, before anything runs: what
transformers would answer with an error of its own, or with other tokens than it gives without a
cache, is a UsageError of one line.
"""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, TextStreamer

from kvbridge.engines.taken import (
    ARGUMENTS,
    DECIDED,
    ONE_BY_ONE,
    ONE_BY_ONE_OFF,
    REFUSED,
    SETTINGS,
    Refusal,
)
from kvbridge.engines.values import WHATEVER, Kind
from kvbridge.errors import UsageError, unknown_names
from kvbridge.model.arguments import found_in, no_autocast
from kvbridge.model.attention import mask_refusal
from kvbridge.model.model import Model

DEFAULT_NEW_TOKENS = 64
_ALONE = {"num_beams": 1, "num_return_sequences": 1}
"""What None means where transformers counts with the value."""


def settings_of(
    model: Model, options: dict[str, Any], max_new_tokens: int | None, prompt: int
) -> GenerationConfig:
    """The configuration that `generate` will use (`options` are not modified) after a prompt of
    `prompt` tokens: `max_new_tokens` where it is given, and DEFAULT_NEW_TOKENS, or as many as there
    are positions for, where nothing says how long.

    Raises UsageError for names that are none of `generate`'s, and where transformers refuses the
    values together.
    """
    if max_new_tokens is not None:
        options = {**options, "max_new_tokens": max_new_tokens}
    _check_names(model, options)
    given = options.get("generation_config")
    if given is not None and not isinstance(given, GenerationConfig):
        raise UsageError(
            f"generation_config=: expected a GenerationConfig, found {type(given).__name__}"
        )
    config = GenerationConfig() if given is None else deepcopy(given)
    fields = {name: value for name, value in options.items() if name in vars(config)}
    for name, value in fields.items():
        # Before transformers reads it: it compares values without asking what they are.
        _check_value(name, SETTINGS.get(name, WHATEVER), value)
    try:
        own = model.model.generation_config.to_dict()
        config.update(**own, defaults_only=True, allow_custom_entries=True)
        config.update(**fields)
    except (ValueError, TypeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(f"generate takes no such settings: {lines[0]}") from error
    if config.max_new_tokens is None and config.max_length is None:
        room = positions_left(model, prompt)
        limit = DEFAULT_NEW_TOKENS if room is None else max(1, room)
        config.max_new_tokens = min(DEFAULT_NEW_TOKENS, limit)
    return config


def check_settings(
    model: Model, config: GenerationConfig, options: dict[str, Any], prompt: int
) -> None:
    """Raises UsageError, naming the setting, for what a handoff does not take, and for what cannot
    be meant after a prompt of `prompt` tokens."""
    for name, refusal in REFUSED.items():
        value = options.get(name, getattr(config, name, None))
        if name == "use_cache":
            # A default of the model's own says what to do without a handoff: there is one, so that
            # only what was asked for counts.
            value = asked(options, name)
        if refusal.applies(value, config):
            raise UsageError(
                f"{name}= is not taken by a handoff: {refusal.why}; {_undo(name, refusal, options)}"
            )
    for name, kind in SETTINGS.items():
        _check_value(name, kind, getattr(config, name, None))
    for name, kind in ARGUMENTS.items():
        _check_value(name, kind, options.get(name))
    _check_unknown_fields(config)
    no_autocast(model.device)
    if masks := mask_refusal(model.model):
        raise UsageError(f"{model.name}: {masks}")
    _check_ids(model, config, options)
    _check_sequences(model, config, options)
    _check_length(model, config, prompt)


def arguments_of(model: Model, config: GenerationConfig, options: dict[str, Any]) -> dict[str, Any]:
    """What `generate` is called with, besides tokens and cache (`config` is modified): `config`
    itself, and what of `options` stands beside it."""
    config.use_cache = True
    given = {name: value for name, value in options.items() if name in ARGUMENTS}
    if config.stop_strings is not None:
        given["tokenizer"] = options.get("tokenizer") or model.tokenizer
    # The model's own default would take the place of None in `config`, but not of an argument.
    own = model.model.generation_config
    undone = [name for name, value in options.items() if value is None and name in vars(config)]
    if getattr(own, "cache_implementation", None) is not None:
        undone.append("cache_implementation")
    config.cache_implementation = None
    given |= {name: _ALONE.get(name) for name in undone}
    return {**given, "generation_config": config}


def positions_left(model: Model, prompt: int) -> int | None:
    """How many tokens can follow a prompt of `prompt` tokens: the last of them is never fed. None
    where positions are computed, and so never run out."""
    if model.rotation.module is not None:
        return None
    return model.geometry.max_positions - prompt + 1


def asked(options: dict[str, Any], name: str) -> Any:
    """What an argument or `generation_config=` says; None where only the model's own does."""
    argument = options.get(name)
    return getattr(options.get("generation_config"), name, None) if argument is None else argument


def goes_one_by_one(config: GenerationConfig) -> bool:
    """Whether prompts of one batch have to be continued alone."""
    values = ((name, getattr(config, name, None)) for name in ONE_BY_ONE)
    return any(value and value != ONE_BY_ONE_OFF.get(name) for name, value in values)


def _check_names(model: Model, options: dict[str, Any]) -> None:
    """Raises UsageError for arguments that are none of `generate`'s, or the handoff's own."""
    if taken := sorted(set(DECIDED) & set(options)):
        raise UsageError(f"the handoff sets {', '.join(taken)} itself; leave it out")
    known = {*SETTINGS, *ARGUMENTS, *REFUSED}
    unknown = sorted(set(options) - known)
    if not unknown:
        return
    forward = inspect.signature(type(model.model).forward).parameters
    fed = [name for name in unknown if name in forward]
    if fed:
        raise UsageError(
            f"{', '.join(fed)}: goes to the model's forward, which has read the prompt already; "
            "leave it out"
        )
    new = [name for name in unknown if name in vars(GenerationConfig())]
    if new:
        raise UsageError(
            f"{', '.join(new)}: whether it can go on from a cache is not known; leave it out"
        )
    raise UsageError(unknown_names("arguments of generate,", unknown, sorted(known)))


def _check_unknown_fields(config: GenerationConfig) -> None:
    """Fields of a newer transformers than this table: whether they go on from a cache is not
    known."""
    defaults = vars(GenerationConfig())
    for name in sorted(set(defaults) - set(SETTINGS) - set(REFUSED)):
        if not name.startswith("_") and getattr(config, name, None) != defaults[name]:
            raise UsageError(
                f"{name}: whether it can go on from a cache is not known; give {name}=None"
            )


def _check_value(name: str, kind: Kind, value: Any) -> None:
    if value is not None and not kind.holds(value):
        raise UsageError(f"{name}=: expected {kind.words}, found {found_in(value)}")


def _check_ids(model: Model, config: GenerationConfig, options: dict[str, Any]) -> None:
    """Raises UsageError for token ids that the model does not have."""
    vocabulary = model.geometry.vocabulary
    settings = {
        name: getattr(config, name, None)
        for name in ("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids", "sequence_bias")
    }
    # Many models' own padding is no token; it counts only where it was asked for.
    settings["pad_token_id"] = asked(options, "pad_token_id")
    for name, value in settings.items():
        beyond = [i for i in _ids_in(value) if not 0 <= i < vocabulary]
        if beyond:
            raise UsageError(
                f"{name}=: expected token ids from 0 to {vocabulary - 1}, found {beyond[0]}"
            )
    if config.exponential_decay_length_penalty is not None and config.eos_token_id is None:
        raise UsageError(
            "exponential_decay_length_penalty= needs eos_token_id=: the model has none"
        )


def _check_sequences(model: Model, config: GenerationConfig, options: dict[str, Any]) -> None:
    """Raises UsageError for what takes one sequence only."""
    beams = (config.num_beams or 1) > 1
    several = beams or (config.num_return_sequences or 1) > 1
    streamer = options.get("streamer")
    if streamer is not None and (beams or (several and isinstance(streamer, TextStreamer))):
        raise UsageError(
            "streamer= takes one sequence; leave num_beams and num_return_sequences out"
        )
    negative = options.get("negative_prompt_ids")
    if negative is not None:
        _check_negative(negative, model.geometry.vocabulary, several)


def _check_length(model: Model, config: GenerationConfig, prompt: int) -> None:
    """Raises UsageError for a length that the prompt fills already, or that there are no positions
    for."""
    longest = config.max_length
    if config.max_new_tokens is None and longest is not None and longest <= prompt:
        raise UsageError(
            f"max_length= counts the prompt: expected more than its {prompt} tokens, found "
            f"{longest}; give max_new_tokens instead"
        )
    room = positions_left(model, prompt)
    wanted = config.max_new_tokens or (longest or 0) - prompt
    if room is not None and wanted > room:
        raise UsageError(
            f"expected at most {max(room, 0)} new tokens after a prompt of {prompt}: "
            f"{model.name} has {model.geometry.max_positions} positions, found {wanted}"
        )


def _check_negative(negative: Any, vocabulary: int, several: bool) -> None:
    if several:
        raise UsageError("negative_prompt_ids= takes one sequence; leave num_beams and such out")
    tensor = isinstance(negative, Tensor) and negative.ndim == 2 and len(negative) == 1
    whole = tensor and not negative.is_floating_point() and negative.numel() > 0
    if not whole or not 0 <= int(negative.min()) <= int(negative.max()) < vocabulary:
        raise UsageError(
            "negative_prompt_ids=: expected an integer tensor [1, tokens] of ids from 0 to "
            f"{vocabulary - 1}, found {found_in(negative)}"
        )


def _undo(name: str, refusal: Refusal, options: dict[str, Any]) -> str:
    """What to do about it, by where it was said."""
    if name in options:
        return "leave it out, or call the receiver's own model.generate without a handoff"
    if getattr(options.get("generation_config"), name, None) is not None:
        return "take it out of generation_config="
    return f"the model's own generation config says so: give {name}={refusal.instead}"


def _ids_in(value: Any) -> list[int]:
    """Every token id in a setting that holds one, some, words of them, or words with a bias."""
    if value is None or isinstance(value, float):
        return []
    if isinstance(value, int):
        return [value]
    if isinstance(value, Tensor):
        return value.flatten().tolist()
    if isinstance(value, dict):
        return [i for word in value for i in word]
    return [i for part in value for i in _ids_in(part)]
