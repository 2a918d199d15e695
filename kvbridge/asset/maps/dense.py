"""One affine map per group of receiver heads: `y = x W + b`, of one layer and stream each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from kvbridge import codec
from kvbridge.asset.maps.base import Block, Maps, Rows, Target, check_block, streams_of
from kvbridge.codec import Index
from kvbridge.errors import UsageError
from kvbridge.geometry import KVGeometry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Receiver heads that share one affine map, and the sender blocks it reads (receiver features
    come before them)."""

    heads: tuple[int, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class GroupEntry:
    """A group as manifests hold it: a block is a sender layer, a stream, and heads or None."""

    heads: tuple[Index, ...]
    blocks: tuple[tuple[Index, str, tuple[Index, ...] | None], ...]
    features: bool

    @classmethod
    def of(cls, group: Group, features: bool) -> GroupEntry:
        """The entry of a group."""
        blocks = tuple((block.layer, block.stream, block.heads) for block in group.blocks)
        return cls(group.heads, blocks, features)

    def typed(self) -> Group:
        """The group of an entry."""
        return Group(self.heads, tuple(Block(*block) for block in self.blocks))


@dataclass(frozen=True)
class MapEntry:
    """The groups of one receiver layer and stream, as manifests hold them."""

    layer: Index
    stream: str
    groups: tuple[GroupEntry, ...]


@dataclass(frozen=True)
class DenseMaps(Maps):
    """`groups[receiver layer, stream]`: every head of the stream is in exactly one of them.

    Of a group, W is `[inputs, heads·width]` and b `[heads·width]`, where x is the receiver's
    features (if `features`) followed by the group's blocks.
    """

    groups: Mapping[Target, tuple[Group, ...]]

    kind: ClassVar[str] = "dense"

    def __post_init__(self) -> None:
        for layer in self.layers:
            streams = streams_of(self.receiver, layer)
            if any((layer, stream) not in self.groups for stream in streams):
                raise UsageError(f"layer {layer}: expected maps of {', '.join(streams)}")
        for (layer, stream), groups in self.groups.items():
            check_block(self.receiver, Block(layer, stream))
            count = self.receiver.layers[layer].stream(stream).heads
            covered = sorted(head for group in groups for head in group.heads)
            if len(covered) != count or covered != list(range(count)):
                raise UsageError(f"layer {layer} {stream}: every head must be in exactly one group")
            for block in (block for group in groups for block in group.blocks):
                check_block(self.sender, block)

    @classmethod
    def read(cls, body: Any, sender: KVGeometry, receiver: KVGeometry, name: str) -> DenseMaps:
        """Of the manifest's list of maps; raises CorruptFile or UsageError."""
        entries = codec.convert(body, tuple[MapEntry, ...], name)
        groups: dict[Target, tuple[Group, ...]] = {}
        for entry in entries:
            if (entry.layer, entry.stream) in groups:
                raise UsageError(f"layer {entry.layer} {entry.stream}: its maps stand twice")
            groups[entry.layer, entry.stream] = tuple(group.typed() for group in entry.groups)
        flags = {group.features for entry in entries for group in entry.groups}
        if len(flags) > 1:
            raise UsageError("some maps read receiver features and some do not")
        return cls(sender, receiver, flags == {True}, groups)

    def to_json(self) -> list[dict[str, Any]]:
        """A list of maps, sorted."""
        entries = []
        for (layer, stream), groups in sorted(self.groups.items()):
            written = tuple(GroupEntry.of(group, self.features) for group in groups)
            entries.append(MapEntry(layer, stream, written))
        return codec.to_json(entries)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Receiver layers that have maps, ascending."""
        return tuple(sorted({layer for layer, _ in self.groups}))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """W and b of every group."""
        shapes: dict[str, tuple[int, ...]] = {}
        for (layer, stream), groups in self.groups.items():
            width = self.receiver.layers[layer].stream(stream).width
            for group, (w, b) in zip(groups, tensor_names(layer, stream, len(groups)), strict=True):
                inputs = self.receiver.hidden_size if self.features else 0
                inputs += sum(block.width(self.sender) for block in group.blocks)
                outputs = len(group.heads) * width
                shapes[w], shapes[b] = (inputs, outputs), (outputs,)
        return shapes

    def names(self, layers: range) -> tuple[str, ...]:
        """Those of the layers' own groups."""
        return tuple(
            name
            for (layer, stream), groups in self._of(layers)
            for pair in tensor_names(layer, stream, len(groups))
            for name in pair
        )

    def described(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Target by target, in the words that run folders have been bound by since their first
        version: a digest made anew is theirs."""
        for (layer, stream), groups in sorted(self.groups.items()):
            parts = [(group.heads, group.blocks, self.features) for group in groups]
            names = [name for pair in tensor_names(layer, stream, len(groups)) for name in pair]
            yield repr(((layer, stream), parts)), tuple(names)

    def reads(self, layers: range) -> tuple[tuple[int, str], ...]:
        """What the layers' groups read."""
        blocks = {
            (block.layer, block.stream)
            for _, groups in self._of(layers)
            for group in groups
            for block in group.blocks
        }
        return tuple(sorted(blocks))

    def flops(self, layers: range) -> int:
        """One multiply-add per number, the bias counted as one."""
        numbers = 0
        for name in self.names(layers):
            shape = self.shapes[name]
            numbers += shape[0] * (shape[1] if len(shape) == 2 else 1)
        return 2 * numbers

    def apply(
        self, weights: Mapping[str, Tensor], rows: Rows, layers: range
    ) -> dict[int, dict[str, Tensor]]:
        """Group by group; groups that read the same share one x."""
        translated: dict[int, dict[str, Tensor]] = {}
        for (layer, stream), groups in self._of(layers):
            parts: list[Tensor] = []
            for group, (w, b) in zip(groups, tensor_names(layer, stream, len(groups)), strict=True):
                weight = weights[w]
                x = rows.columns(group.blocks, features=self.features, dtype=weight.dtype)
                parts.append((x @ weight + weights[b]).unflatten(-1, (len(group.heads), -1)))
            translated.setdefault(layer, {})[stream] = _side_by_side(parts, groups)
        return translated

    def _of(self, layers: range) -> Iterator[tuple[Target, tuple[Group, ...]]]:
        """Targets in `layers`, sorted, with their groups."""
        for target, groups in sorted(self.groups.items()):
            if target[0] in layers:
                yield target, groups


def tensor_names(layer: int, stream: str, groups: int) -> list[tuple[str, str]]:
    """Names of W and b, group by group: `target.{layer}.{k|v}.{W|b}`, numbered where there are
    several groups."""
    stem = f"target.{layer}.{stream}"
    if groups == 1:
        return [(f"{stem}.W", f"{stem}.b")]
    return [(f"{stem}.{number}.W", f"{stem}.{number}.b") for number in range(groups)]


def _side_by_side(parts: list[Tensor], groups: Iterable[Group]) -> Tensor:
    """`[tokens, heads, width]` out of the heads of each group."""
    if len(parts) == 1:
        return parts[0]
    heads = sum(part.shape[1] for part in parts)
    whole = parts[0].new_empty((parts[0].shape[0], heads, parts[0].shape[2]))
    for part, group in zip(parts, groups, strict=True):
        first, last = group.heads[0], group.heads[-1]
        if group.heads == tuple(range(first, last + 1)):
            whole[:, first : last + 1] = part
        else:
            whole[:, list(group.heads)] = part
    return whole
