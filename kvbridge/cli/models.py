"""The models of a command: those that are named, or those that an asset was fitted for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import kvbridge
from kvbridge.asset.folder import Asset
from kvbridge.cli.checks import check_models
from kvbridge.errors import UsageError
from kvbridge.geometry import KVGeometry
from kvbridge.handoff.stages.check import difference
from kvbridge.model.model import Model


def loaded(names: Sequence[str], device: str) -> list[Model]:
    """Models of a command, on a device that exists; none is loaded where another cannot be."""
    check_models(names, device)
    return [kvbridge.load(name, device=device) for name in names]


def one_by_one(names: Sequence[str], device: str) -> list[Model]:
    """Models in the device's dtype that never share it: each is moved to host memory before the
    next is loaded."""
    check_models(names, device)
    models = []
    for name in names:
        (model,) = loaded([name], device)
        model.model.to("cpu")
        models.append(model)
    return models


def models_of(asset: Asset, names: tuple[str | None, str | None], device: str) -> list[Model]:
    """The pair an asset was fitted for, from where its manifest (or the caller) says it lies.
    Raises UsageError where a model there is another one."""
    sides = (asset.manifest.sender, asset.manifest.receiver)
    places = [_place(name, geometry) for name, geometry in zip(names, sides, strict=True)]
    check_models(places, device)
    models = []
    for role, place, geometry in zip(("sender", "receiver"), places, sides, strict=True):
        model = kvbridge.load(place, device=device, dtype=getattr(torch, geometry.dtype))
        if model.geometry.digest != geometry.digest:
            raise UsageError(
                f"{asset.path} was fitted for {geometry.model_id} as its {role}, {place} differs "
                f"in {difference(geometry, model.geometry)}; name the model it was fitted for "
                f"(--{role})"
            )
        models.append(model)
    return models


def _place(given: str | None, geometry: KVGeometry) -> str:
    """Where to load a model from: the given place, else the manifest's id at its commit."""
    if given is not None:
        return given
    pinned = geometry.commit and "@" not in geometry.model_id
    return f"{geometry.model_id}@{geometry.commit}" if pinned else geometry.model_id
