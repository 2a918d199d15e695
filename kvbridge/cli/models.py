"""The models of a command: those that are named, or those that an asset was fitted for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

import kvbridge
from kvbridge.asset.folder import Asset
from kvbridge.cli.checks import check_models
from kvbridge.cli.options import ModelOptions
from kvbridge.errors import UsageError
from kvbridge.geometry import KVGeometry, difference
from kvbridge.model.model import Model
from kvbridge.model.outline import stored_dtype

ROLES = ("sender", "receiver")


def loaded(asked: ModelOptions) -> list[Model]:
    """Models of a command, on a device that exists; none is loaded where another cannot be."""
    check_models(asked)
    return list(_each(asked))


def one_by_one(asked: ModelOptions) -> list[Model]:
    """Models in the device's dtype that never share it: each is moved to host memory before the
    next is loaded."""
    check_models(asked)
    models = []
    for model in _each(asked):
        model.model.to("cpu")
        models.append(model)
    return models


def dtype_of(asked: ModelOptions, name: str) -> torch.dtype | None:
    """The dtype to load a model in; None for `kvbridge.load`'s default."""
    if asked.dtype is None:
        return None
    return stored_dtype(name) if asked.dtype == "auto" else getattr(torch, asked.dtype)


def models_of(asset: Asset, asked: ModelOptions) -> list[Model]:
    """The pair an asset was fitted for, from where its manifest (or the caller) says it lies, in
    the dtype that it was fitted with. Raises UsageError where a model there is another one, or is
    asked for in another dtype or with another adapter."""
    sides = (asset.manifest.sender, asset.manifest.receiver)
    places = [_place(name, geometry) for name, geometry in zip(asked.names, sides, strict=True)]
    placed = replace(asked, names=tuple(places))
    check_models(placed)
    _check_dtypes(asset, [dtype_of(asked, place) for place in places])
    for role, geometry, adapter in zip(ROLES, sides, asked.adapters, strict=True):
        _check_adapter(asset, role, geometry, adapter)
    models = []
    for role, place, geometry, adapter in zip(ROLES, places, sides, asked.adapters, strict=True):
        dtype = getattr(torch, geometry.dtype)
        model = kvbridge.load(place, device=asked.device, dtype=dtype, adapter=adapter)
        if model.geometry.digest != geometry.digest:
            raise UsageError(
                f"{asset.path} was fitted for {geometry.model_id} as its {role}, {place} "
                f"{difference(geometry, model.geometry)}; name the model it was fitted for "
                f"(--{role})"
            )
        models.append(model)
    return models


def _each(asked: ModelOptions) -> Iterator[Model]:
    for name, adapter in zip(asked.names, asked.adapters, strict=True):
        assert name is not None, "only a command with an asset may leave names to it"
        dtype = dtype_of(asked, name)
        yield kvbridge.load(name, device=asked.device, dtype=dtype, adapter=adapter)


def _check_dtypes(asset: Asset, asked: Sequence[torch.dtype | None]) -> None:
    """Raises UsageError where one of the pair is asked for in another dtype than it was fitted
    with."""
    fitted = [side.dtype for side in (asset.manifest.sender, asset.manifest.receiver)]
    wanted = [str(dtype).removeprefix("torch.") for dtype in asked]
    differ = [d is not None and w != f for d, w, f in zip(asked, wanted, fitted, strict=True)]
    if not any(differ):
        return
    sender, receiver = fitted
    if sender == receiver:
        which, how = f"{sender} models", f"with --dtype {sender}, or without --dtype"
    else:
        which, how = f"a {sender} sender and a {receiver} receiver", "without --dtype"
    raise UsageError(
        f"{asset.path} was fitted with {which}; load them {how}; found "
        f"{', '.join(w for w, d in zip(wanted, differ, strict=True) if d)}"
    )


def _check_adapter(asset: Asset, role: str, geometry: KVGeometry, adapter: str | None) -> None:
    """Raises UsageError where a model was fitted with an adapter and none is given, or the other
    way round."""
    if geometry.adapters and adapter is None:
        raise UsageError(
            f"{asset.path} was fitted with the adapter {', '.join(geometry.adapters)} in its "
            f"{role}; give its folder with --{role}-adapter"
        )
    if adapter is not None and not geometry.adapters:
        raise UsageError(
            f"{asset.path} was fitted without an adapter in its {role}; leave --{role}-adapter out"
        )


def _place(given: str | None, geometry: KVGeometry) -> str:
    """Where to load a model from: the given place, else the manifest's id at its commit."""
    if given is not None:
        return given
    pinned = geometry.commit and "@" not in geometry.model_id
    return f"{geometry.model_id}@{geometry.commit}" if pinned else geometry.model_id
