"""What a kind of map must be able to say and do. No torch: a kind is given its tensors, `x @ W + b`
needs no import."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from kvbridge.errors import CorruptFile, UsageError
from kvbridge.format import FLOAT_DTYPES
from kvbridge.geometry import KVGeometry, digest_json
from kvbridge.headers import Header, expect_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Target = tuple[int, str]
"""A receiver layer and the name of one of its streams."""


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


class Rows(Protocol):
    """The aligned rows that one translation reads, one per receiver token."""

    def columns(self, blocks: Sequence[Block], *, features: bool, dtype: torch.dtype) -> Tensor:
        """Receiver features (if asked for), then `blocks`, side by side: `[tokens, inputs]`.

        Made once for equal arguments: do not modify it.
        """
        ...


@dataclass(frozen=True)
class Maps(ABC):
    """All maps of one translator, as its manifest describes them; the numbers stand in tensors.

    `features`: whether they read receiver features. A kind describes a whole translator, so that
    one product may serve every layer. Tensors keep the names and dtypes that they have in the file,
    which is why no kind has anything to do to be saved, loaded or moved; `shapes` says which there
    are. Methods that take `layers` answer for those receiver layers alone. None of this modifies
    its arguments.
    """

    sender: KVGeometry
    receiver: KVGeometry
    features: bool

    kind: ClassVar[str]
    """Its key of MAP_KINDS, and its name in manifests."""

    @classmethod
    @abstractmethod
    def read(cls, body: Any, sender: KVGeometry, receiver: KVGeometry, name: str) -> Self:
        """The inverse of `to_json`, of JSON that may be hostile: raises CorruptFile naming `name`,
        or UsageError as the constructor does, unless every index is within its geometry."""

    @abstractmethod
    def to_json(self) -> Any:
        """What the manifest says of the maps, in plain JSON types; a mapping for every kind but the
        dense one."""

    @property
    @abstractmethod
    def layers(self) -> tuple[int, ...]:
        """Receiver layers that have maps, ascending: every stream of each."""

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name → shape of all that the maps are made of."""

    @abstractmethod
    def reads(self, layers: range) -> tuple[tuple[int, str], ...]:
        """Sender layer and stream of all that is read, ascending."""

    @abstractmethod
    def flops(self, layers: range) -> int:
        """FLOPs per translated token, 2 per multiply-add."""

    @abstractmethod
    def apply(
        self, weights: Mapping[str, Tensor], rows: Rows, layers: range
    ) -> dict[int, dict[str, Tensor]]:
        """Receiver layer → stream → `[tokens, heads, width]` in content space, in any
        floating-point dtype."""

    def names(self, layers: range) -> tuple[str, ...]:
        """Names of the tensors that `apply` needs: all, unless a kind keeps layers apart."""
        return tuple(self.shapes)

    def described(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """What a translator's digest covers, in order: a text that says what maps are, and the
        tensors that hold their numbers."""
        yield digest_json([self.kind, self.to_json()]), tuple(sorted(self.shapes))

    def dtypes(self, tensor: str) -> Sequence[str]:
        """Dtypes, as safetensors calls them, that a tensor may have in the file. Tensors that may
        have several must all have the same one."""
        return FLOAT_DTYPES

    @cached_property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def admit(self, header: Header, name: str) -> None:
        """Raises CorruptFile unless the header of a file holds these maps' tensors and no others,
        in the dtypes that they may have.

        Called before any tensor is allocated. The header itself is sound by then: its byte ranges
        hold the shapes that it states.
        """
        expect_tensors(header, self.shapes, "the manifest", name)
        free: set[str] = set()
        for tensor, (dtype, _, _) in header.tensors.items():
            allowed = self.dtypes(tensor)
            if dtype not in allowed:
                raise CorruptFile(
                    f"{name}: expected {tensor[:80]} in {' or '.join(allowed)}, found {dtype}"
                )
            if len(allowed) > 1:
                free.add(dtype)
        if len(free) > 1:
            raise CorruptFile(
                f"{name}: expected weights of one dtype, found {', '.join(sorted(free))}"
            )


def streams_of(geometry: KVGeometry, layer: int) -> tuple[str, ...]:
    """Names of a layer's streams; raises UsageError where there is no such layer."""
    if not 0 <= layer < len(geometry.layers):
        raise UsageError(f"{geometry.model_id} has no layer {layer}")
    return tuple(stream.name for stream in geometry.layers[layer].streams)


def check_block(geometry: KVGeometry, block: Block) -> None:
    """Raises UsageError where a block names what the model does not have."""
    if block.stream not in streams_of(geometry, block.layer):
        raise UsageError(
            f"{geometry.model_id} has no layer {block.layer} with a stream {block.stream!r:.40}"
        )
    count = geometry.layers[block.layer].stream(block.stream).heads
    if block.heads and not 0 <= min(block.heads) <= max(block.heads) < count:
        raise UsageError(
            f"layer {block.layer} {block.stream} has {count} heads, expected no {max(block.heads)}"
        )
