"""kvbridge: one language model takes over another's conversation without reading it again."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbridge.asset import Asset, load_asset, load_controls, save_asset
    from kvbridge.bridge import Bridge
    from kvbridge.errors import KVBridgeError
    from kvbridge.evidence import Evidence
    from kvbridge.fitting.config import FitConfig
    from kvbridge.fitting.job import Fit, fit
    from kvbridge.geometry import KVGeometry, Stream
    from kvbridge.handoff import Handoff, generate_many
    from kvbridge.models import Model, load, wrap
    from kvbridge.prefill import capture
    from kvbridge.provenance import Decision, Provenance
    from kvbridge.repair import RepairPlan
    from kvbridge.rope import Rotation
    from kvbridge.snapshot import KVSnapshot
    from kvbridge.translator import Translator

__version__ = "0.1.0"

_WHERE = {
    "Asset": "asset",
    "Bridge": "bridge",
    "Decision": "provenance",
    "Evidence": "evidence",
    "Fit": "fitting.job",
    "FitConfig": "fitting.config",
    "Handoff": "handoff",
    "KVBridgeError": "errors",
    "KVGeometry": "geometry",
    "KVSnapshot": "snapshot",
    "Model": "models",
    "Provenance": "provenance",
    "RepairPlan": "repair",
    "Rotation": "rope",
    "Stream": "geometry",
    "Translator": "translator",
    "capture": "prefill",
    "fit": "fitting.job",
    "generate_many": "handoff",
    "load": "models",
    "load_asset": "asset",
    "load_controls": "asset",
    "save_asset": "asset",
    "wrap": "models",
}

__all__ = [
    "Asset",
    "Bridge",
    "Decision",
    "Evidence",
    "Fit",
    "FitConfig",
    "Handoff",
    "KVBridgeError",
    "KVGeometry",
    "KVSnapshot",
    "Model",
    "Provenance",
    "RepairPlan",
    "Rotation",
    "Stream",
    "Translator",
    "capture",
    "fit",
    "generate_many",
    "load",
    "load_asset",
    "load_controls",
    "save_asset",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that `kvbridge.manifest` and the store never load torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'kvbridge' has no attribute {name!r}")
    value = getattr(import_module(f"kvbridge.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
