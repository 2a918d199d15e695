"""Ways to make a cache of a prompt, honest and spoilt ones, as libraries and callers leave them.

Each takes a model, its own cache of the prompt as pairs of keys and values `[1, heads, tokens,
width]`, and the prompt's ids `[tokens]`; it gives what a caller would hand to `from_cache`: a
cache, ids and further arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import kvbridge
from kvbridge.model.probe import cache_argument, cached_layers

Pairs = list[tuple[Tensor, Tensor]]
Given = tuple[Any, Tensor, dict[str, Any]]
Way = Callable[[kvbridge.Model, Pairs, Tensor], Given]


@torch.no_grad()
def pairs_of(model: kvbridge.Model, ids: Tensor, **arguments: Any) -> Pairs:
    """What a plain forward over ids `[tokens]` or `[batch, tokens]` caches."""
    cache = DynamicCache()
    batch = ids if ids.ndim == 2 else ids[None]
    model.model(input_ids=batch, **cache_argument(model.model, cache), **arguments)
    return [(keys.clone(), values.clone()) for keys, values in cached_layers(cache)]


def grown(step: int) -> Way:
    """Filled in pieces of `step` tokens."""

    @torch.no_grad()
    def way(model: kvbridge.Model, pairs: Pairs, ids: Tensor) -> Given:
        cache = DynamicCache()
        for start in range(0, len(ids), step):
            piece = ids[None, start : start + step]
            model.model(input_ids=piece, **cache_argument(model.model, cache))
        return cache, ids, {}

    return way


def padded(left: int, right: int, *, told: bool, plain: bool = False) -> Way:
    """Padded; `plain` is a forward without position_ids, else positions count as generate does."""

    def way(model: kvbridge.Model, pairs: Pairs, ids: Tensor) -> Given:
        pads = [torch.zeros(count, dtype=torch.int64) for count in (left, right)]
        row = torch.cat((pads[0], ids, pads[1]))
        places = torch.arange(len(row))
        mask = ((places >= left) & (places < left + len(ids))).long()[None]
        positions = {} if plain else {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
        cache = pairs_of(model, row, attention_mask=mask, **positions)
        return cache, row, {"attention_mask": mask[0]} if told else {}

    return way


def at_positions(positions: Callable[[int], Tensor], *, told: bool) -> Way:
    """A forward with position_ids of the caller's."""

    def way(model: kvbridge.Model, pairs: Pairs, ids: Tensor) -> Given:
        places = positions(len(ids))
        cache = pairs_of(model, ids, position_ids=places[None])
        return cache, ids, {"position_ids": places} if told else {}

    return way


def kept(rows: Callable[[int], Tensor], *, ids_too: bool = False, told: bool = False) -> Way:
    """The same rows taken out of every layer; `ids_too` out of the ids as well."""

    def way(model: kvbridge.Model, pairs: Pairs, ids: Tensor) -> Given:
        at = rows(len(ids))
        cache = [(keys[:, :, at], values[:, :, at]) for keys, values in pairs]
        return cache, ids[at] if ids_too else ids, {"position_ids": at} if told else {}

    return way


def changed(change: Callable[[Tensor], Tensor], *, first: int = 0, last: int | None = None) -> Way:
    """Every tensor of layers `first` to `last` (counted as in a slice) changed."""

    def way(model: kvbridge.Model, pairs: Pairs, ids: Tensor) -> Given:
        cache = list(pairs)
        for index in range(len(pairs))[first:last]:
            keys, values = pairs[index]
            cache[index] = (change(keys.clone()), change(values.clone()))
        return cache, ids, {}

    return way


def evicted_per_head(first: int) -> Way:
    """Half of the rows of each head, others in each, from layer `first` on; below, the first
    half."""

    def way(model: kvbridge.Model, pairs: Pairs, ids: Tensor) -> Given:
        half = len(ids) // 2
        cache = [(keys[:, :, :half], values[:, :, :half]) for keys, values in pairs]
        for index in range(first, len(pairs)):
            draw = torch.Generator().manual_seed(index)
            heads = pairs[index][0].shape[1]
            rows = [torch.randperm(len(ids), generator=draw)[:half] for _ in range(heads)]
            at = torch.stack([r.sort().values for r in rows])[None, :, :, None]
            keys, values = (t.gather(2, at.expand(-1, -1, -1, t.shape[3])) for t in pairs[index])
            cache[index] = (keys, values)
        return cache, ids, {}

    return way


def other_token(at: int, *, upper: bool = False) -> Way:
    """The cache of a prompt with another token; with `upper` layer 0 is the right one."""

    def way(model: kvbridge.Model, pairs: Pairs, ids: Tensor) -> Given:
        other = ids.clone()
        other[at] = (int(ids[at]) + 7) % 300 + 20
        cache = pairs_of(model, other)
        return [*pairs[:1], *cache[1:]] if upper else cache, ids, {}

    return way


def masked(at: int, *, told: bool) -> Way:
    """One token within the prompt masked."""

    def way(model: kvbridge.Model, pairs: Pairs, ids: Tensor) -> Given:
        mask = torch.ones((1, len(ids)), dtype=torch.int64)
        mask[0, at] = 0
        cache = pairs_of(model, ids, attention_mask=mask)
        return cache, ids, {"attention_mask": mask[0]} if told else {}

    return way


def hidden_from(queries: slice, keys: slice) -> Way:
    """A forward with a mask of the caller's that hides some tokens from some."""

    def way(model: kvbridge.Model, pairs: Pairs, ids: Tensor) -> Given:
        least = torch.finfo(model.dtype).min
        mask = torch.full((len(ids), len(ids)), least, dtype=model.dtype).triu(1)
        mask[queries, keys] = least
        return pairs_of(model, ids, attention_mask=mask[None, None]), ids, {}

    return way


def static(extra: int, missing: int, *, pairs_only: bool) -> Way:
    """A pre-allocated cache with room for `extra` tokens more than the prompt, of which the last
    `missing` have not run."""

    @torch.no_grad()
    def way(model: kvbridge.Model, pairs: Pairs, ids: Tensor) -> Given:
        cache = StaticCache(config=model.model.config, max_cache_len=len(ids) + extra)
        ran = ids[None, : len(ids) - missing]
        model.model(input_ids=ran, **cache_argument(model.model, cache))
        padding = torch.zeros(extra, dtype=torch.int64)
        if not pairs_only:
            return cache, ids, {}
        return list(cached_layers(cache)), torch.cat((ids, padding)), {}

    return way


def row_of_a_batch(model: kvbridge.Model, pairs: Pairs, ids: Tensor) -> Given:
    """One request of two that ran side by side."""
    cache = pairs_of(model, torch.stack((ids, ids.flip(0))))
    return [(keys[:1], values[:1]) for keys, values in cache], ids, {}


def whole_batch(model: kvbridge.Model, pairs: Pairs, ids: Tensor) -> Given:
    """Both of them, as beams are."""
    return pairs_of(model, torch.stack((ids, ids))), ids, {}


def two_prompts(model: kvbridge.Model, pairs: Pairs, ids: Tensor) -> Given:
    """Ids of two prompts over one row."""
    half = len(ids) // 2
    rows = [(keys[:, :, : 2 * half], values[:, :, : 2 * half]) for keys, values in pairs]
    return rows, ids[: 2 * half].reshape(2, half), {}


def _restarted(count: int) -> Tensor:
    return torch.cat((torch.arange(30), torch.arange(count - 30)))


def second_of_a_pack(model: kvbridge.Model, pairs: Pairs, ids: Tensor) -> Given:
    """The second of two documents in one row, which has seen the first."""
    cache = pairs_of(model, ids, position_ids=_restarted(len(ids))[None])
    return [(keys[:, :, 30:], values[:, :, 30:]) for keys, values in cache], ids[30:], {}


def soft_prompt(model: kvbridge.Model, pairs: Pairs, ids: Tensor) -> Given:
    """Embeddings that are no token's in place of the first five."""
    embeddings = model.model.get_input_embeddings()(ids[None]).detach().clone()
    draw = torch.Generator().manual_seed(0)
    embeddings[:, :5] += torch.randn(embeddings[:, :5].shape, generator=draw)
    cache = DynamicCache()
    with torch.no_grad():
        model.model(inputs_embeds=embeddings, **cache_argument(model.model, cache))
    return cache, ids, {}


def quantised(bits: int, axis: int) -> Callable[[Tensor], Tensor]:
    """Rounded to integers of so many bits with a scale along `axis`, and back."""

    def change(tensor: Tensor) -> Tensor:
        scale = tensor.float().abs().amax(dim=axis, keepdim=True).clamp_min(1e-9)
        scale = scale / (2 ** (bits - 1) - 1)
        return ((tensor.float() / scale).round() * scale).to(tensor.dtype)

    return change


def _rounded_to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype).to(tensor.dtype)


def _all_but_the_last_quantised(tensor: Tensor) -> Tensor:
    tensor[:, :, :-10] = quantised(4, 2)(tensor)[:, :, :-10]
    return tensor


def _merged(tensor: Tensor) -> Tensor:
    tensor[:, :, 10:12] = tensor[:, :, 10:12].mean(dim=2, keepdim=True)
    return tensor


def _one_row_zero(tensor: Tensor) -> Tensor:
    tensor[:, :, 5] = 0
    return tensor


def _in_another_order(tensor: Tensor) -> Tensor:
    tensor[:, :, 10:20] = tensor[:, :, 10:20].flip(2)
    return tensor


def _sinks_and_recent(count: int) -> Tensor:
    return torch.cat((torch.arange(4), torch.arange(count - 20, count)))


def _without_the_middle(count: int) -> Tensor:
    return torch.cat((torch.arange(20), torch.arange(26, count)))


def _gapped(count: int) -> Tensor:
    places = torch.arange(count)
    places[20:] += 9
    return places


HONEST: dict[str, Way] = {
    "prefilled": lambda model, pairs, ids: (pairs, ids, {}),
    "prefix": kept(lambda count: torch.arange(count - 7)),
    "token by token": grown(1),
    "in pieces": grown(13),
    "row of a batch": row_of_a_batch,
    "left padded, counted": padded(6, 0, told=True),
    "right padded": padded(0, 6, told=True),
}
SPOILT: dict[str, Way] = {
    "left padded, plain": padded(6, 0, told=True, plain=True),
    "left padded, untold": padded(6, 0, told=False),
    "left padded, plain, untold": padded(6, 0, told=False, plain=True),
    "right padded, untold": padded(0, 6, told=False),
    "moved by 3": at_positions(lambda count: torch.arange(3, 3 + count), told=False),
    "moved by 3, told": at_positions(lambda count: torch.arange(3, 3 + count), told=True),
    "gapped": at_positions(_gapped, told=False),
    "gapped, told": at_positions(_gapped, told=True),
    "stretched": at_positions(lambda count: 2 * torch.arange(count), told=False),
    "packed": at_positions(_restarted, told=False),
    "packed, told": at_positions(_restarted, told=True),
    "second of a pack": second_of_a_pack,
    "second part": kept(lambda count: torch.arange(30, count), ids_too=True),
    "second part, told": kept(lambda count: torch.arange(30, count), ids_too=True, told=True),
    "sinks and recent": kept(_sinks_and_recent),
    "sinks and recent, ids": kept(_sinks_and_recent, ids_too=True),
    "sinks and recent, told": kept(_sinks_and_recent, ids_too=True, told=True),
    "cropped at the front": kept(lambda count: torch.arange(5, count)),
    "cropped in the middle": kept(_without_the_middle),
    "evicted per head": evicted_per_head(0),
    "evicted per head, upper": evicted_per_head(1),
    "merged": changed(_merged),
    "merged, upper": changed(_merged, first=1),
    "merged, one layer": changed(_merged, first=2, last=3),
    "merged, last": changed(_merged, first=-1),
    "one row zero, last": changed(_one_row_zero, first=-1),
    "one row zero, layer 1": changed(_one_row_zero, first=1, last=2),
    "another order, upper": changed(_in_another_order, first=1),
    "heads swapped, upper": changed(lambda tensor: tensor.roll(1, -1), first=1),
    "int8 by row": changed(quantised(8, 3)),
    "int8 by channel": changed(quantised(8, 2)),
    "int4, upper": changed(quantised(4, 3), first=1),
    "int4, all but the last": changed(_all_but_the_last_quantised),
    "int4, all but the last, upper": changed(_all_but_the_last_quantised, first=1),
    "fp8": changed(_rounded_to(torch.float8_e4m3fn)),
    "fp8, upper": changed(_rounded_to(torch.float8_e4m3fn), first=1),
    "other token": other_token(12),
    "other token, upper": other_token(12, upper=True),
    "other first token, upper": other_token(0, upper=True),
    "masked": masked(5, told=False),
    "masked, told": masked(5, told=True),
    "hidden for a while": hidden_from(slice(20, 30), slice(5, 10)),
    "two documents, one mask": hidden_from(slice(30, None), slice(0, 30)),
    "static": static(0, 0, pairs_only=False),
    "static with room": static(8, 0, pairs_only=False),
    "static, not full": static(0, 4, pairs_only=True),
    "static with room, as pairs": static(6, 0, pairs_only=True),
    "batch": whole_batch,
    "two prompts": two_prompts,
    "soft prompt": soft_prompt,
}
"""In fp32 rounding to bf16 and fp16 belongs here, too; a test of that dtype adds it."""
