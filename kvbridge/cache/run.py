"""A model's decoder over token ids: what every pass through it starts from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvbridge.errors import UsageError
from kvbridge.model.model import Model
from kvbridge.model.probe import cache_argument


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
