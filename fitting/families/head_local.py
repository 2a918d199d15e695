"""Each receiver head reads one matching head of the selected sender layers (arXiv 2609.00891,
without its row weights)."""

from __future__ import annotations

from kvbridge.asset.maps.base import Block
from kvbridge.asset.maps.dense import Group
from kvbridge.geometry import KVGeometry


def head_local(
    sender: KVGeometry, receiver: KVGeometry, layer: int, stream: str, support: tuple[int, ...]
) -> tuple[Group, ...]:
    """One group per receiver head h. With H_s sender and H_r receiver heads it reads sender head
    ⌊h·H_s / H_r⌋: the same head where counts agree, else neighbours share one, in order."""
    heads = receiver.layers[layer].stream(stream).heads
    groups = []
    for head in range(heads):
        blocks = tuple(
            Block(source, stream, (head * sender.layers[source].stream(stream).heads // heads,))
            for source in support
        )
        groups.append(Group((head,), blocks))
    return tuple(groups)
