"""Every receiver head reads all heads of the selected sender layers (arXiv 2608.03893)."""

from __future__ import annotations

from kvbridge.asset.maps.base import Block
from kvbridge.asset.maps.dense import Group
from kvbridge.geometry import KVGeometry


def full_head(
    sender: KVGeometry, receiver: KVGeometry, layer: int, stream: str, support: tuple[int, ...]
) -> tuple[Group, ...]:
    """One group of all heads; its map is `[layers · sender heads · width, receiver heads ·
    width]`."""
    heads = tuple(range(receiver.layers[layer].stream(stream).heads))
    return (Group(heads, tuple(Block(source, stream) for source in support)),)
