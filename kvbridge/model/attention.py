"""A receiver's attention queries, taken from the forward that computes them anyway."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from kvbridge.model.load import Model


@dataclass(frozen=True, eq=False)
class Queries:
    """Queries of one forward by layer. Layers whose attention is not plain softmax over scaled dot
    products (logit softcapping, attention sinks) or whose query projection was not found are
    missing."""

    model: Model
    projected: dict[int, Tensor] = field(default_factory=dict)

    def at(self, layer: int, rows: Tensor, positions: Tensor) -> Tensor | None:
        """Queries of the forward's tokens `rows` `[n]`, which stand at `positions` `[n]`:
        normalised, rotated and scaled, so that their dot product with a cached key is the attention
        logit, `[n, query heads, width]` fp32. None where the layer is missing."""
        if layer not in self.projected:
            return None
        attention = attention_of(self.model.layers[layer])
        width = self.model.geometry.layers[layer].stream("k").width
        flat = self.projected[layer][rows.to(self.projected[layer].device)]
        heads = _normalised(attention, flat, width)
        turned: Tensor = self.model.rotation.rotate(heads, positions, layer)
        return turned * float(getattr(attention, "scaling", width**-0.5))


@contextmanager
def recorded_queries(model: Model) -> Iterator[Queries]:
    """Inside the block, projected queries `[tokens, query heads · width]` of this thread's forwards
    are kept, the last forward's for each layer; the hooks are removed at its end."""
    found, ours, handles = Queries(model), threading.get_ident(), []
    try:
        for index, layer in enumerate(model.layers):
            source = _source(attention_of(layer), model, index)
            if source is None:
                continue
            module, part = source

            def keep(
                _m: nn.Module, _i: Any, output: Tensor, index: int = index, part: Any = part
            ) -> None:
                if threading.get_ident() == ours:
                    found.projected[index] = part(output.detach())[0]

            handles.append(module.register_forward_hook(keep))
        yield found
    finally:
        for handle in handles:
            handle.remove()


def attention_of(layer: nn.Module) -> Any:
    """A decoder layer's attention, under whichever of the usual names it stands; None where it has
    none."""
    return next(
        (getattr(layer, a) for a in ("self_attn", "attn", "attention") if hasattr(layer, a)), None
    )


def _source(attention: Any, model: Model, index: int) -> tuple[nn.Module, Any] | None:
    """The module whose output holds the queries before norm and RoPE, and how to take them from it
    `[1, tokens, ·]`."""
    geometry = model.geometry
    stream = geometry.layers[index].stream("k")
    width, heads = stream.width, geometry.attention_heads
    if (
        attention is None
        or getattr(attention, "attn_logit_softcapping", None)
        or hasattr(attention, "sinks")
    ):
        return None
    if isinstance(getattr(attention, "q_proj", None), nn.Module):
        return attention.q_proj, lambda output: output
    if hasattr(attention, "c_attn"):
        return attention.c_attn, lambda output: output.chunk(3, dim=-1)[0]
    if hasattr(attention, "qkv_proj"):
        return attention.qkv_proj, lambda output: output[..., : heads * width]
    if hasattr(attention, "query_key_value"):
        return attention.query_key_value, lambda output: output.unflatten(-1, (heads, 3, -1))[
            ..., 0, :
        ].flatten(-2)
    return None


def _normalised(attention: Any, flat: Tensor, width: int) -> Tensor:
    """Projected queries `[n, heads · width]` as heads `[n, heads, width]`, through the layer's
    query norm if it has one: over each head, or over all of them where its weight is as long as
    that."""
    norm = getattr(attention, "q_norm", None)
    if not isinstance(norm, nn.Module):
        return flat.unflatten(-1, (-1, width)).float()
    weight = getattr(norm, "weight", None)
    whole = (
        isinstance(weight, Tensor) and weight.ndim == 1 and len(weight) == flat.shape[-1] != width
    )
    normed: Tensor = norm(flat) if whole else norm(flat.unflatten(-1, (-1, width)))
    return (normed.unflatten(-1, (-1, width)) if whole else normed).float()
