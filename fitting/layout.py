"""Which products of columns a fit gathers: the blocks, which pairs meet, and the bytes that
takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvbridge.fitting.select import relative_order
from kvbridge.geometry import KVGeometry

FEATURES = (-1, "features")
Key = tuple[int, str]


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
        return {
            key: tuple(sorted((k for k in found if order[k] >= order[key]), key=order.__getitem__))
            for key, found in meets.items()
        }

    @cached_property
    def serves(self) -> dict[Key, tuple[Key, ...]]:
        """For each input block, the targets it may serve."""
        found: dict[Key, list[Key]] = {key: [] for key, _ in self.inputs}
        for target, _ in self.targets:
            if FEATURES in found:
                found[FEATURES].append(target)
            for layer in self.reads[target]:
                found[(layer, target[1])].append(target)
        return {key: tuple(targets) for key, targets in found.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of one set of moments in fp64."""
        width, out = dict(self.inputs), dict(self.targets)
        products = sum(
            width[k]
            * (sum(width[p] for p in self.partners[k]) + sum(out[t] for t in self.serves[k]))
            for k in width
        )
        return 8 * (products + 2 * sum(width.values()) + 3 * sum(out.values()))


def make_layout(
    sender: KVGeometry, receiver: KVGeometry, *, features: bool, candidates: int | None
) -> Layout:
    """Layout of a pair; `candidates` limits each target to that many sender layers nearest in
    relative depth."""
    inputs = [(FEATURES, receiver.hidden_size)] if features else []
    streams = [s.name for s in sender.layers[0].streams]
    for name in streams:
        inputs += [
            ((i, name), layer.stream(name).features) for i, layer in enumerate(sender.layers)
        ]
    targets = [
        ((i, s.name), s.features) for i, layer in enumerate(receiver.layers) for s in layer.streams
    ]
    reads = {}
    for (layer, name), _ in targets:
        order = relative_order(len(sender.layers), layer / max(1, len(receiver.layers) - 1))
        reads[layer, name] = tuple(order[:candidates])
    return Layout(tuple(inputs), tuple(targets), reads)


def _offsets(blocks: tuple[tuple[Key, int], ...]) -> dict[Key, slice]:
    found, at = {}, 0
    for key, width in blocks:
        found[key] = slice(at, at + width)
        at += width
    return found
