"""What commands check before they load a model: seconds, where a mistake would otherwise show after
minutes."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import torch

from kvbridge.asset.folder import Asset
from kvbridge.cli.options import ModelOptions
from kvbridge.errors import UsageError
from kvbridge.format import CALIBRATION, CONTROL_SET, SUMS, TRANSLATOR
from kvbridge.model.load import check_source

ADAPTER_CONFIG = "adapter_config.json"
"""What PEFT reads first in an adapter's folder."""


def check_out(out: Path, *, new: str | None = None) -> None:
    """Raises UsageError where no folder can be written at `out`, or only into an asset, a control
    set or a calibration, whose digest would no longer be true; with `new` (what stands there for
    good, in the plural) also where something is there already. Nothing is made."""
    if new is not None and os.path.lexists(out):
        raise UsageError(f"--out {out} exists; {new} are never overwritten, choose another folder")
    at = next(p for p in (out.absolute(), *out.absolute().parents) if os.path.lexists(p))
    if not at.is_dir():
        raise UsageError(f"--out {out}: {at} is no folder; choose another one")
    if not os.access(at, os.W_OK | os.X_OK):
        raise UsageError(f"--out {out}: nothing may be written in {at}; choose another folder")
    if (at / SUMS).exists() and any(
        (at / folder.description).exists() for folder in (TRANSLATOR, CALIBRATION)
    ):
        raise UsageError(
            f"--out {out}: {at} is an asset or calibration, which nothing is added to; choose "
            "another folder"
        )


def check_controls(asset: Asset, given: Path | None) -> None:
    """Raises UsageError where an asset has no control set: without it nothing can be said of its
    translations."""
    where = given or CONTROL_SET.beside(asset.path)
    if not where.is_dir():
        raise UsageError(
            f"no control set stands at {where}; fit again, or give its folder with --controls"
        )


def check_spill(folder: str | None) -> None:
    """Raises UsageError where rows cannot be spilled to `folder` (None: the system's temporary
    one)."""
    if folder is not None and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        raise UsageError(
            f"--spill-folder {folder}: expected an existing folder that may be written to"
        )


def check_models(asked: ModelOptions) -> None:
    """Raises UsageError where the device or what an adapter needs is not there, LoadError where one
    of several models has no configuration."""
    device = asked.device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: no CUDA device is available here; use --device cpu")
    for name in asked.names:
        assert name is not None, "only a command with an asset may leave names to it"
        check_source(name)
    for adapter in asked.adapters:
        if adapter is not None:
            _check_adapter(adapter)


def _check_adapter(adapter: str) -> None:
    """Raises UsageError where PEFT is not installed or a folder is no adapter's."""
    if find_spec("peft") is None:
        raise UsageError(
            f"the adapter {adapter} needs the package peft: pip install 'kvbridge[adapters]'"
        )
    if Path(adapter).is_dir() and not (Path(adapter) / ADAPTER_CONFIG).exists():
        raise UsageError(f"the adapter {adapter}: no {ADAPTER_CONFIG} stands in this folder")
