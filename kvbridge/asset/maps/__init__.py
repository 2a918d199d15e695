"""Kinds of maps by the name that manifests give them. A new one is one file and one line here."""

from __future__ import annotations

from kvbridge.asset.maps.base import Maps
from kvbridge.asset.maps.dense import DenseMaps

MAP_KINDS: dict[str, type[Maps]] = {
    "dense": DenseMaps,
}

__all__ = ["MAP_KINDS", "Maps"]
