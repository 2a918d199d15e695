"""The one verb of a map family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvbridge.asset.maps.translator import Block
from kvbridge.geometry import KVGeometry


@dataclass(frozen=True)
class Group:
    """Receiver heads that share one affine map, and the sender blocks it reads (receiver features come on top)."""

    heads: tuple[int, ...]
    blocks: tuple[Block, ...]


class Family(Protocol):
    """Groups of one receiver layer and stream, given the sender layers selected for it.

    Every receiver head stands in exactly one group; blocks name streams of the same kind as the target (`k` reads k).
    """

    def __call__(
        self,
        sender: KVGeometry,
        receiver: KVGeometry,
        layer: int,
        stream: str,
        support: tuple[int, ...],
    ) -> tuple[Group, ...]:
        """The groups."""
        ...
