"""`transformers.generate` from a cache: whatever it can do, with the tokens it would have had."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, GenerationConfig

from kvbridge.cache.padded import padded_cache
from kvbridge.cache.snapshot import build_cache
from kvbridge.engines.port import Prefilled
from kvbridge.engines.settings import (
    arguments_of,
    asked,
    check_settings,
    goes_one_by_one,
    settings_of,
)
from kvbridge.errors import UsageError
from kvbridge.model.model import Model
from kvbridge.model.probe import cache_argument


@torch.no_grad()
def generate(
    model: Model, prompt: Prefilled, max_new_tokens: int | None, options: dict[str, Any]
) -> Any:
    """Prompt and continuation, `[sequences, tokens]`, or the dictionary that was asked for; none of
    the arguments is modified."""
    if len(prompt.ids) == 0:
        raise UsageError("the prompt is empty: there is no token to go on from")
    config = settings_of(model, options, max_new_tokens, len(prompt.ids))
    check_settings(model, config, options, len(prompt.ids))
    arguments = arguments_of(model, config, options)
    ids = prompt.ids[None].to(model.device)
    if prompt.layers is not None:
        cache = build_cache(model, prompt.layers, prompt.provenance)
        arguments |= _from_cache(model, cache, config)
    return model.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **arguments)


@torch.no_grad()
def generate_many(
    model: Model,
    prompts: Sequence[Prefilled],
    max_new_tokens: int | None,
    options: dict[str, Any],
) -> list[Tensor]:
    """Continues several prompts in one batch, padded on the left; those without rows go one by one,
    and so do all where a setting reads the prompt's tokens, which padding must not change. Nothing
    is modified.

    Returns prompt and continuation `[tokens]` each, padding removed from the left. One sequence
    each: raises UsageError where generate would return more, or something else than tokens, and for
    `max_length=`, which would count the padding.
    """
    longest = max((len(prompt.ids) for prompt in prompts), default=0)
    config = settings_of(model, options, max_new_tokens, longest)
    check_settings(model, config, options, longest)
    total = config.max_length is not None and config.max_new_tokens is None
    if total and asked(options, "max_length") is not None:
        raise UsageError(
            "generate_many pads prompts to one length: give max_new_tokens instead of max_length"
        )
    for name in ("num_return_sequences", "return_dict_in_generate"):
        if (getattr(config, name, None) or 1) != 1 or getattr(config, name, None) is True:
            raise UsageError(
                f"generate_many returns the tokens of one sequence per handoff; leave {name} out"
            )
    if options.get("streamer") is not None and len(prompts) > 1:
        raise UsageError("streamer= takes one sequence; use Handoff.generate for each handoff")
    alone = total or goes_one_by_one(config)
    continued: dict[int, Tensor] = {}
    ids, caches, places = [], [], []
    for place, prompt in enumerate(prompts):
        if prompt.layers is None or alone:
            continued[place] = generate(model, prompt, max_new_tokens, options)[0]
        else:
            ids.append(prompt.ids)
            caches.append(prompt.layers)
            places.append(place)
    if places:
        arguments = arguments_of(model, config, options)
        longest = max(map(len, ids))
        pads = [longest - len(one) for one in ids]
        batch = torch.stack([pad(one, (before, 0)) for one, before in zip(ids, pads, strict=True)])
        cache, mask = padded_cache(model, caches)
        mask = torch.cat((mask, torch.ones((len(ids), 1), dtype=torch.int64)), dim=1)
        arguments |= _from_cache(model, cache, config)
        out = model.model.generate(
            input_ids=batch.to(model.device), attention_mask=mask.to(model.device), **arguments
        )
        for place, row, before in zip(places, out, pads, strict=True):
            continued[place] = row[before:]
    return [continued[place] for place in range(len(prompts))]


def _from_cache(model: Model, cache: DynamicCache, config: GenerationConfig) -> dict[str, Any]:
    """The cache argument of `generate`, with one row per beam or returned sequence (`cache` is
    modified)."""
    copies = max(config.num_beams or 1, config.num_return_sequences or 1)
    if copies > 1:
        cache.batch_repeat_interleave(copies)
    return cache_argument(model.model, cache)
