"""The fitted translator: frozen, callable, maps of some kind and their tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvbridge.asset.maps.base import Block, Maps
from kvbridge.cache.snapshot import LayerKV
from kvbridge.errors import UsageError
from kvbridge.geometry import KVGeometry


@dataclass(frozen=True, eq=False)
class Translator:
    """Maps of receiver layers, with the tensors that they are made of, under the names that they
    have in the file.

    Layers without a map, or outside `span` (None: all are inside), are the receiver's to compute.
    `receiver_features` is `none`, `embeddings` or `hidden:m`. Raises UsageError where tensors are
    missing or of other shapes.
    """

    family: str
    receiver_features: str
    maps: Maps
    tensors: Mapping[str, Tensor]
    span: range | None = None

    def __post_init__(self) -> None:
        for name in self.maps.names(self.within()):
            expected, tensor = self.maps.shapes[name], self.tensors.get(name)
            if tensor is None or tuple(tensor.shape) != expected:
                shape = None if tensor is None else tuple(tensor.shape)
                raise UsageError(f"{name}: expected shape {expected}, found {shape}")

    def within(self, skip_layers: int = 0) -> range:
        """Receiver layers from `skip_layers` on, as far as this translator goes."""
        span = range(len(self.receiver.layers)) if self.span is None else self.span
        return range(max(skip_layers, span.start), span.stop)

    @property
    def sender(self) -> KVGeometry:
        """The geometry whose cache is read."""
        return self.maps.sender

    @property
    def receiver(self) -> KVGeometry:
        """The geometry whose cache is made."""
        return self.maps.receiver

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Receiver layers that are translated, ascending."""
        within = self.within()
        return tuple(layer for layer in self.maps.layers if layer in within)

    @cached_property
    def sender_layers(self) -> tuple[int, ...]:
        """Sender layers that any map reads, ascending."""
        return tuple(sorted({layer for layer, _ in self.maps.reads(self.within())}))

    @cached_property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(self.tensors[name].numel() for name in self.maps.names(self.within()))

    def flops(self, *, skip_layers: int = 0) -> int:
        """FLOPs per translated token (2 per multiply-add) of layers from `skip_layers` on."""
        return self.maps.flops(self.within(skip_layers))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what the maps are and of every number in them."""
        state, tensors = hashlib.sha256(), self.saved()
        for text, names in self.maps.described():
            state.update(text.encode())
            for name in names:
                state.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
        return state.hexdigest()

    def saved(self) -> dict[str, Tensor]:
        """The tensors as they are written: on the CPU, contiguous, sorted by name."""
        return {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in sorted(self.tensors.items())
        }

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Translator:
        """The same translator elsewhere, or its floating-point tensors in another dtype."""
        tensors = {
            name: tensor.to(device, dtype if tensor.is_floating_point() else None)
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=tensors)

    def only(self, layers: range) -> Translator:
        """The part of this translator that makes `layers` of the receiver, with the tensors it
        needs, not copied."""
        whole = self.within(layers.start)
        span = range(whole.start, min(whole.stop, layers.stop))
        tensors = {name: self.tensors[name] for name in self.maps.names(span)}
        return replace(self, tensors=tensors, span=span)

    @torch.no_grad()
    def __call__(
        self, content: Mapping[int, LayerKV], features: Tensor | None, *, skip_layers: int = 0
    ) -> dict[int, LayerKV]:
        """Translates aligned rows.

        content[sender layer][stream] `[tokens, heads, width]`, features `[tokens, hidden]` or None,
        both already one row per receiver token. Returns receiver layer → stream → `[tokens, heads,
        width]` fp32 in content space, for layers from `skip_layers` on. Arguments are not modified.
        """
        if self.maps.features and features is None:
            raise UsageError(
                f"this translator reads receiver features ({self.receiver_features}); "
                "none were given"
            )
        rows = AlignedRows(content, features)
        translated = self.maps.apply(self.tensors, rows, self.within(skip_layers))
        return {
            layer: {name: tensor.float() for name, tensor in streams.items()}
            for layer, streams in translated.items()
        }


class AlignedRows:
    """Rows as a translator takes them; see `Rows`."""

    def __init__(self, content: Mapping[int, LayerKV], features: Tensor | None) -> None:
        self._content = content
        self._features = features
        self._made: dict[tuple[tuple[Block, ...], bool, torch.dtype], Tensor] = {}

    def columns(self, blocks: Sequence[Block], *, features: bool, dtype: torch.dtype) -> Tensor:
        """Features and blocks side by side, `[tokens, inputs]`, made once."""
        key = (tuple(blocks), features, dtype)
        if key not in self._made:
            self._made[key] = self._join(blocks, features, dtype)
        return self._made[key]

    def _join(self, blocks: Sequence[Block], features: bool, dtype: torch.dtype) -> Tensor:
        parts = [self._features.to(dtype)] if features and self._features is not None else []
        for block in blocks:
            tensor = self._content[block.layer][block.stream]
            if block.heads is not None:
                tensor = tensor[:, list(block.heads)]
            parts.append(tensor.flatten(1).to(dtype))
        if not parts:
            raise UsageError(
                "a map must read something: receiver features or at least one sender block"
            )
        return torch.cat(parts, dim=-1)
