"""The one verb of a map family."""

from __future__ import annotations

from typing import Protocol

from kvbridge.asset.maps.dense import Group
from kvbridge.geometry import KVGeometry


class Family(Protocol):
    """Groups of one receiver layer and stream, given the sender layers selected for it.

    Every receiver head stands in exactly one group; blocks name streams of the same kind as the
    target (`k` reads k).
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
