"""A receiver's attention queries, taken from the forward that computes them anyway."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from kvbridge.model.attention import (
    attention_of,
    normed_queries,
    plain_softmax,
    projection,
    recorded,
    scaling_of,
)
from kvbridge.model.model import Model


@dataclass(frozen=True, eq=False)
class Queries:
    """Queries of one forward by layer, as projected `[tokens, query heads · width]`.

    Layers are missing whose attention is not a plain softmax over scaled dot products (logit
    softcapping, attention sinks), or whose query projection stands under no known name.
    """

    model: Model
    projected: dict[int, Tensor] = field(default_factory=dict)

    def at(self, layer: int, rows: Tensor, positions: Tensor) -> Tensor | None:
        """Queries of the forward's tokens `rows` `[n]`, which stand at `positions` `[n]`.

        Normalised, rotated and scaled, so that their dot product with a cached key is the attention
        logit: `[n, query heads, width]` fp32. None where the layer is missing.
        """
        if layer not in self.projected:
            return None
        attention = attention_of(self.model.layers[layer])
        width = self.model.geometry.layers[layer].stream("k").width
        # Norm and RoPE are applied here and not in the hook: few rows of a forward are asked for.
        projected = self.projected[layer]
        heads = normed_queries(attention, projected[rows.to(projected.device)], width)
        rotated: Tensor = self.model.rotation.rotate(heads, positions, layer)
        return rotated * scaling_of(attention, width)


@contextmanager
def recorded_queries(model: Model) -> Iterator[Queries]:
    """Inside the block, queries of this thread's forwards are kept, each layer's last.

    Forwards of one text; the hooks are removed at the end.
    """
    queries, thread = Queries(model), threading.get_ident()
    projections = {}
    for layer, module in enumerate(model.layers):
        attention = attention_of(module)
        source = projection(attention, "q")
        if source is not None and plain_softmax(attention):
            projections[layer] = source

    def keep(layer: int, output: Tensor) -> None:
        # A model may serve other threads meanwhile: their queries are not this request's.
        if threading.get_ident() == thread:
            queries.projected[layer] = output[0]

    with recorded(projections, keep):
        yield queries
