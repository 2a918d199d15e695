"""Which products of columns a fit gathers: the blocks, which pairs meet, and the bytes that
takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvbridge.fitting.select import relative_order
from kvbridge.geometry import KVGeometry

FEATURES = (-1, "features")
"""The block of receiver features, which belong to no sender layer."""
Key = tuple[int, str]
"""Layer and stream: of the sender for an input block, of the receiver for a target."""


@dataclass(frozen=True)
class Layout:
    """Input blocks (receiver features first, then each sender layer's stream) and targets, with
    their widths in columns.

    `reads[target]` lists the sender layers that may serve it. Two input blocks meet when some
    target may read both; features meet everything.
    """

    inputs: tuple[tuple[Key, int], ...]
    targets: tuple[tuple[Key, int], ...]
    reads: dict[Key, tuple[int, ...]]

    @cached_property
    def input_at(self) -> dict[Key, slice]:
        """Columns of each input block."""
        return _offsets(self.inputs)

    @cached_property
    def target_at(self) -> dict[Key, slice]:
        """Columns of each target."""
        return _offsets(self.targets)

    @cached_property
    def partners(self) -> dict[Key, tuple[Key, ...]]:
        """For each input block: itself and the later blocks it meets (symmetric products are
        gathered once)."""
        order = {key: i for i, (key, _) in enumerate(self.inputs)}
        meets: dict[Key, set[Key]] = {key: {key} for key, _ in self.inputs}
        for (_, stream), layers in self.reads.items():
            keys = [(layer, stream) for layer in layers]
            for key in keys:
                meets[key].update(keys)
        if FEATURES in meets:
            meets[FEATURES].update(order)
        partners = {}
        for key, met in meets.items():
            later = [other for other in met if order[other] >= order[key]]
            partners[key] = tuple(sorted(later, key=order.__getitem__))
        return partners

    @cached_property
    def serves(self) -> dict[Key, tuple[Key, ...]]:
        """For each input block, the targets it may serve."""
        served: dict[Key, list[Key]] = {key: [] for key, _ in self.inputs}
        for target, _ in self.targets:
            if FEATURES in served:
                served[FEATURES].append(target)
            for layer in self.reads[target]:
                served[(layer, target[1])].append(target)
        return {key: tuple(targets) for key, targets in served.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of one set of moments in fp64."""
        width, out = dict(self.inputs), dict(self.targets)
        products = 0
        for key in width:
            columns = sum(width[partner] for partner in self.partners[key])
            columns += sum(out[target] for target in self.serves[key])
            products += width[key] * columns
        # Beside the products: shift and sum of every column, and of targets the squares.
        numbers = products + 2 * sum(width.values()) + 3 * sum(out.values())
        return 8 * numbers


def make_layout(
    sender: KVGeometry, receiver: KVGeometry, *, features: bool, candidates: int | None
) -> Layout:
    """Layout of a pair; `candidates` limits each target to that many sender layers nearest in
    relative depth."""
    inputs = [(FEATURES, receiver.hidden_size)] if features else []
    # A stream's layers follow one another, so that what meets is one view of the rows, not a copy.
    for name in [stream.name for stream in sender.layers[0].streams]:
        for index, layer in enumerate(sender.layers):
            inputs.append(((index, name), layer.stream(name).features))
    targets = []
    for index, layer in enumerate(receiver.layers):
        targets += [((index, stream.name), stream.features) for stream in layer.streams]
    reads = {}
    for (index, name), _ in targets:
        depth = index / max(1, len(receiver.layers) - 1)
        reads[index, name] = tuple(relative_order(len(sender.layers), depth)[:candidates])
    return Layout(tuple(inputs), tuple(targets), reads)


def _offsets(blocks: tuple[tuple[Key, int], ...]) -> dict[Key, slice]:
    offsets, start = {}, 0
    for key, width in blocks:
        offsets[key] = slice(start, start + width)
        start += width
    return offsets
