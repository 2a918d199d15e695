"""Running a model over texts and taking its KV: one request as a snapshot, or batches as rows for a
fit."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.errors import UsageError
from kvbridge.model.model import Model
from kvbridge.model.probe import cache_argument, cached_layers
from kvbridge.model.text import Encoding


@torch.no_grad()
def capture(
    model: Model,
    text: str | None = None,
    *,
    input_ids: Tensor | None = None,
    messages: list[dict[str, Any]] | None = None,
) -> KVSnapshot:
    """Prefills `model` over exactly one of text, input_ids `[tokens]` or messages (its own chat
    template).

    Every layer keeps its full length, sliding ones too. Raises UsageError on none or several of the
    three, an empty text, or more tokens than the model has positions.
    """
    if sum(x is not None for x in (text, input_ids, messages)) != 1:
        raise UsageError("expected exactly one of text, input_ids and messages")
    if messages is not None:
        text = model.render(messages)
    ids = (
        model.encode(text).ids
        if text is not None
        else one_sequence(input_ids, model.geometry.vocabulary)
    )
    if len(ids) == 0:
        raise UsageError("expected at least one token, found an empty text")
    if len(ids) > model.geometry.max_positions:
        raise UsageError(
            f"{len(ids)} tokens are more than the {model.geometry.max_positions} positions of "
            f"{model.name}"
        )
    cache = DynamicCache()
    run_decoder(model, ids[None], cache=cache)
    return KVSnapshot.from_cache(cache, model, ids, text=text)


def one_sequence(input_ids: Any, vocabulary: int) -> Tensor:
    """Token ids `[tokens]` out of an integer tensor `[tokens]` or `[1, tokens]`; UsageError for
    anything else."""
    if (
        not isinstance(input_ids, Tensor)
        or input_ids.is_floating_point()
        or input_ids.dtype == torch.bool
    ):
        raise UsageError(
            f"expected an integer tensor of token ids, found {type(input_ids).__name__}"
        )
    if input_ids.ndim not in (1, 2) or (input_ids.ndim == 2 and len(input_ids) != 1):
        raise UsageError(
            "expected token ids [tokens] or [1, tokens] of one request, found "
            f"{tuple(input_ids.shape)}"
        )
    ids = input_ids.to("cpu", torch.int64).reshape(-1)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise UsageError(
            f"expected token ids from 0 to {vocabulary - 1}, found {int(ids.min())} to "
            f"{int(ids.max())}"
        )
    return ids


def run_decoder(model: Model, ids: Tensor, *, cache: DynamicCache, **arguments: Any) -> Any:
    """The decoder without its head over ids `[batch, tokens]`; `cache` is filled. Returns its
    output."""
    decoder = model.decoder
    moved = {
        name: value.to(model.device) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    return decoder(
        input_ids=ids.to(model.device), use_cache=True, **cache_argument(decoder, cache), **moved
    )


@contextmanager
def recorded_at(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Inside the block, what enters `layer` is appended to the list; the hook is removed at its
    end."""
    entered: list[Tensor] = []
    thread = threading.get_ident()

    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            entered.append(args[0] if args else kwargs["hidden_states"])

    handle = layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield entered
    finally:
        handle.remove()


@dataclass(frozen=True)
class Batch:
    """KV of several texts in content space, padded at the end.

    `layers[i][stream]` `[batch, tokens, heads, width]` fp32; `mask` `[batch, tokens]` True on real
    tokens; `hidden` `[batch, tokens, hidden]` fp32: what enters layer `hidden_layer`, where it was
    asked for.
    """

    layers: list[dict[str, Tensor]]
    mask: Tensor
    hidden: Tensor | None


@torch.no_grad()
def capture_batch(
    model: Model, encodings: Sequence[Encoding], *, hidden_layer: int | None = None
) -> Batch:
    """One forward of the decoder over padded texts, in the model's dtype; RoPE is then removed."""
    longest = max(len(e) for e in encodings)
    ids = torch.zeros((len(encodings), longest), dtype=torch.int64)
    mask = torch.zeros((len(encodings), longest), dtype=torch.bool)
    for row, encoding in enumerate(encodings):
        ids[row, : len(encoding)] = encoding.ids
        mask[row, : len(encoding)] = True
    cache = DynamicCache()
    asked = nullcontext() if hidden_layer is None else recorded_at(model.layers[hidden_layer])
    with asked as entered:
        run_decoder(
            model,
            ids,
            cache=cache,
            attention_mask=mask.long(),
            position_ids=torch.arange(longest).expand_as(ids),
        )
    positions = torch.arange(longest)
    layers = []
    for index, (k, v) in enumerate(cached_layers(cache)):
        keys = model.rotation.unrotate(k.transpose(1, 2), positions, index)
        layers.append({"k": keys, "v": v.transpose(1, 2).float()})
    return Batch(layers, mask.to(model.device), entered[0].float() if entered else None)
