"""The fitted translator: frozen, callable, one affine map per group of receiver heads, in content space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvbridge.cache.snapshot import LayerKV
from kvbridge.errors import UsageError
from kvbridge.geometry import KVGeometry


@dataclass(frozen=True)
class Block:
    """Columns read from the sender: one layer's stream, all its heads (None) or some."""

    layer: int
    stream: str
    heads: tuple[int, ...] | None = None

    def width(self, geometry: KVGeometry) -> int:
        """Number of columns."""
        stream = geometry.layers[self.layer].stream(self.stream)
        return stream.features if self.heads is None else len(self.heads) * stream.width


@dataclass(frozen=True, eq=False)
class GroupMap:
    """`y = x W + b` for some heads of one receiver layer and stream.

    x is the receiver's features (if `features`) followed by `blocks`; W `[inputs, heads·width]`, b `[heads·width]`.
    """

    heads: tuple[int, ...]
    blocks: tuple[Block, ...]
    features: bool
    W: Tensor
    b: Tensor


@dataclass(frozen=True, eq=False)
class Translator:
    """Maps of every (receiver layer, stream); layers without one are the receiver's to compute.

    `receiver_features` is `none`, `embeddings` or `hidden:m`; sender and receiver are the geometries it was fitted on.
    """

    sender: KVGeometry
    receiver: KVGeometry
    family: str
    receiver_features: str
    maps: Mapping[tuple[int, str], tuple[GroupMap, ...]]

    def __post_init__(self) -> None:
        for (layer, name), groups in self.maps.items():
            stream = self.receiver.layers[layer].stream(name)
            if sorted(h for g in groups for h in g.heads) != list(range(stream.heads)):
                raise UsageError(f"layer {layer} {name}: every head must be in exactly one group")
            for g in groups:
                width = sum(b.width(self.sender) for b in g.blocks) + (
                    self.receiver.hidden_size if g.features else 0
                )
                if (
                    tuple(g.W.shape) != (width, len(g.heads) * stream.width)
                    or g.b.shape[0] != g.W.shape[1]
                ):
                    raise UsageError(
                        f"layer {layer} {name}: expected W [{width}, {len(g.heads) * stream.width}], found {tuple(g.W.shape)}"
                    )

    @property
    def layers(self) -> tuple[int, ...]:
        """Receiver layers that are translated, ascending."""
        return tuple(sorted({layer for layer, _ in self.maps}))

    @cached_property
    def sender_layers(self) -> tuple[int, ...]:
        """Sender layers that any map reads, ascending."""
        return tuple(
            sorted({b.layer for groups in self.maps.values() for g in groups for b in g.blocks})
        )

    @cached_property
    def parameters(self) -> int:
        """Numbers in all maps: also the multiply-adds per translated token."""
        return sum(g.W.numel() + g.b.numel() for groups in self.maps.values() for g in groups)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Translator:
        """The same translator elsewhere or in another dtype."""
        maps = {
            key: tuple(
                replace(
                    g, W=g.W.to(device, dtype or g.W.dtype), b=g.b.to(device, dtype or g.b.dtype)
                )
                for g in groups
            )
            for key, groups in self.maps.items()
        }
        return replace(self, maps=maps)

    @torch.no_grad()
    def __call__(
        self, content: Mapping[int, LayerKV], features: Tensor | None, *, skip_layers: int = 0
    ) -> dict[int, LayerKV]:
        """Translates aligned rows.

        content[sender layer][stream] `[tokens, heads, width]`, features `[tokens, hidden]` or None, both already
        one row per receiver token. Returns receiver layer → stream → `[tokens, heads, width]` fp32 in content
        space, for layers from `skip_layers` on. Arguments are not modified.
        """
        needs = any(g.features for groups in self.maps.values() for g in groups)
        if needs and features is None:
            raise UsageError(
                f"this translator reads receiver features ({self.receiver_features}); none were given"
            )
        found: dict[int, LayerKV] = {}
        joined: dict[tuple[bool, tuple[Block, ...]], Tensor] = {}
        for (layer, name), groups in sorted(self.maps.items()):
            if layer < skip_layers:
                continue
            stream = self.receiver.layers[layer].stream(name)
            parts: list[Tensor] = []
            for g in groups:
                key = (g.features, g.blocks)
                if key not in joined:
                    joined[key] = join_inputs(
                        content, features if g.features else None, g.blocks, g.W.dtype
                    )
                parts.append((joined[key] @ g.W + g.b).unflatten(-1, (len(g.heads), stream.width)))
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            order = [h for g in groups for h in g.heads]
            if order != sorted(order):
                whole = whole[:, torch.tensor(order).argsort().to(whole.device)]
            found.setdefault(layer, {})[name] = whole.float()
        return found


def join_inputs(
    content: Mapping[int, LayerKV],
    features: Tensor | None,
    blocks: Sequence[Block],
    dtype: torch.dtype,
) -> Tensor:
    """Features and blocks side by side, `[tokens, inputs]`."""
    parts = [] if features is None else [features.to(dtype)]
    for block in blocks:
        tensor = content[block.layer][block.stream]
        if block.heads is not None:
            tensor = tensor[:, list(block.heads)]
        parts.append(tensor.flatten(1).to(dtype))
    if not parts:
        raise UsageError(
            "a map must read something: receiver features or at least one sender block"
        )
    return torch.cat(parts, dim=-1)
