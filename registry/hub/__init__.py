"""Sharing translators through a Hugging Face Hub: `Hub.push` and `Hub.pull`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbridge.registry.hub.hub import Hub, Pushed

__all__ = ["Hub", "Pushed"]


def __getattr__(name: str) -> Any:
    """Imported on first use: the Hub's client takes a third of a second, and cards need none."""
    if name not in __all__:
        raise AttributeError(f"module 'kvbridge.registry.hub' has no attribute {name!r}")
    from kvbridge.registry.hub import hub

    return getattr(hub, name)
