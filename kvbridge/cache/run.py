"""A model's decoder over token ids: what every pass through it starts from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache

from kvbridge.model.arguments import no_autocast
from kvbridge.model.model import Model
from kvbridge.model.probe import cache_argument


def run_decoder(model: Model, ids: Tensor, *, cache: DynamicCache, **arguments: Any) -> Any:
    """The decoder without its head over ids `[batch, tokens]`; `cache` is filled. Returns its
    output."""
    no_autocast(model.device)
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
