"""`transformers.generate` from a cache: whatever it can do, with the tokens it would have had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from kvbridge.cache.padded import padded_cache
from kvbridge.cache.snapshot import build_cache
from kvbridge.engines.port import Prefilled
from kvbridge.errors import UsageError
from kvbridge.model.model import Model
from kvbridge.model.probe import cache_argument

DEFAULT_NEW_TOKENS = 64


@torch.no_grad()
def generate(
    model: Model, prompt: Prefilled, max_new_tokens: int | None, options: dict[str, Any]
) -> Tensor:
    """Prompt and continuation, `[sequences, tokens]`; none of the arguments is modified."""
    arguments = _arguments(options, max_new_tokens)
    if len(prompt.ids) == 0:
        raise UsageError("the prompt is empty: there is no token to go on from")
    ids = prompt.ids[None].to(model.device)
    if prompt.layers is not None:
        cache = build_cache(model, prompt.layers, prompt.provenance)
        arguments |= _from_cache(model, cache, arguments)
    return model.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **arguments)


@torch.no_grad()
def generate_many(
    model: Model,
    prompts: Sequence[Prefilled],
    max_new_tokens: int | None,
    options: dict[str, Any],
) -> list[Tensor]:
    """Continues several prompts in one batch, padded on the left; those without rows go one by one.
    Nothing is modified.

    Returns prompt and continuation `[tokens]` each, padding removed from the left. One sequence
    each: raises UsageError where generate would return more, or something else than tokens, and for
    `max_length=`, which would count the padding.
    """
    arguments = _arguments(options, max_new_tokens)
    lengths = (options.get("max_length"), _asked(options, "max_length"))
    if any(length is not None for length in lengths):
        raise UsageError(
            "generate_many pads prompts to one length: give max_new_tokens instead of max_length"
        )
    for name, plain in (("num_return_sequences", 1), ("return_dict_in_generate", False)):
        if (_setting(model, name, options) or plain) != plain:
            raise UsageError(
                f"generate_many returns the tokens of one sequence per handoff; leave {name} out"
            )
    continued: dict[int, Tensor] = {}
    ids, caches, places = [], [], []
    for place, prompt in enumerate(prompts):
        if prompt.layers is None:
            continued[place] = generate(model, prompt, max_new_tokens, options)[0]
        else:
            ids.append(prompt.ids)
            caches.append(prompt.layers)
            places.append(place)
    if places:
        longest = max(map(len, ids))
        pads = [longest - len(one) for one in ids]
        batch = torch.stack([pad(one, (before, 0)) for one, before in zip(ids, pads, strict=True)])
        cache, mask = padded_cache(model, caches)
        mask = torch.cat((mask, torch.ones((len(ids), 1), dtype=torch.int64)), dim=1)
        arguments |= _from_cache(model, cache, arguments)
        out = model.model.generate(
            input_ids=batch.to(model.device), attention_mask=mask.to(model.device), **arguments
        )
        for place, row, before in zip(places, out, pads, strict=True):
            continued[place] = row[before:]
    return [continued[place] for place in range(len(prompts))]


def _arguments(options: dict[str, Any], max_new_tokens: int | None) -> dict[str, Any]:
    """`options` as generate's arguments, with a length: `max_new_tokens` where it is given,
    DEFAULT_NEW_TOKENS where nothing says how long. Raises UsageError for what a handoff decides."""
    decided = {
        "input_ids",
        "inputs",
        "inputs_embeds",
        "attention_mask",
        "past_key_values",
        "cache",
        "position_ids",
    }
    if taken := decided & set(options):
        raise UsageError(f"the handoff sets {', '.join(sorted(taken))} itself; leave it out")
    said = (
        options.get("max_length")
        or _asked(options, "max_new_tokens")
        or _asked(options, "max_length")
    )
    if max_new_tokens is None and said:
        return dict(options)
    length = DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    return {**options, "max_new_tokens": length}


def _from_cache(model: Model, cache: DynamicCache, arguments: dict[str, Any]) -> dict[str, Any]:
    """The cache arguments of `generate`, with one row per beam or returned sequence (`cache` is
    modified). Raises UsageError where the cache may not be used."""
    if arguments.get("use_cache") is False or _asked(arguments, "use_cache") is False:
        raise UsageError("a handoff goes on from its cache: leave use_cache=False out")
    copies = max(
        _setting(model, name, arguments) or 1 for name in ("num_beams", "num_return_sequences")
    )
    if copies > 1:
        cache.batch_repeat_interleave(copies)
    return {**cache_argument(model.model, cache), "use_cache": True}


def _setting(model: Model, name: str, arguments: dict[str, Any]) -> Any:
    """What `generate` will use for `name`: its argument, else generation_config=, else the model's
    own; None if unset."""
    asked = (arguments.get(name), _asked(arguments, name))
    default = getattr(model.model.generation_config, name, None)
    return next((value for value in asked if value is not None), default)


def _asked(arguments: dict[str, Any], name: str) -> Any:
    """What a `generation_config=` among the arguments says for `name`."""
    return getattr(arguments.get("generation_config"), name, None)
