"""kvbridge: one language model takes over another's conversation without reading it again."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvbridge.moved import install

if TYPE_CHECKING:
    from kvbridge.asset.folder import Asset, load_asset, load_controls, save_asset
    from kvbridge.asset.maps.translator import Translator
    from kvbridge.cache.prefill import capture
    from kvbridge.cache.provenance import Provenance
    from kvbridge.cache.snapshot import KVSnapshot
    from kvbridge.errors import KVBridgeError
    from kvbridge.fitting.config import FitConfig
    from kvbridge.fitting.job import Fit, fit
    from kvbridge.geometry import KVGeometry, Stream
    from kvbridge.handoff.bridge import Bridge
    from kvbridge.handoff.decision import Decision
    from kvbridge.handoff.evidence import Evidence
    from kvbridge.handoff.plan import RepairPlan
    from kvbridge.handoff.result import Handoff, generate_many
    from kvbridge.model.load import load, wrap
    from kvbridge.model.model import Model
    from kvbridge.model.rope import Rotation

__version__ = "0.1.0"

install()

_WHERE = {
    "Asset": "asset.folder",
    "Bridge": "handoff.bridge",
    "Decision": "handoff.decision",
    "Evidence": "handoff.evidence",
    "Fit": "fitting.job",
    "FitConfig": "fitting.config",
    "Handoff": "handoff.result",
    "KVBridgeError": "errors",
    "KVGeometry": "geometry",
    "KVSnapshot": "cache.snapshot",
    "Model": "model.model",
    "Provenance": "cache.provenance",
    "RepairPlan": "handoff.plan",
    "Rotation": "model.rope",
    "Stream": "geometry",
    "Translator": "asset.maps.translator",
    "capture": "cache.prefill",
    "fit": "fitting.job",
    "generate_many": "handoff.result",
    "load": "model.load",
    "load_asset": "asset.folder",
    "load_controls": "asset.folder",
    "save_asset": "asset.folder",
    "wrap": "model.load",
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
    """Public names are imported on first use.

    So that `kvbridge.asset.manifest` and the store never load torch.
    """
    if name not in _WHERE:
        raise AttributeError(f"module 'kvbridge' has no attribute {name!r}")
    value = getattr(import_module(f"kvbridge.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
