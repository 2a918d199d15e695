"""The public names, and that looking at files needs no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvbridge

PUBLIC = [
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


def test_all_is_pinned():
    assert kvbridge.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(kvbridge))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_is_there(name):
    public = getattr(kvbridge, name)
    assert public.__module__.startswith("kvbridge.")
    assert public.__doc__


def test_unknown_names():
    with pytest.raises(AttributeError, match="nothing_of_ours"):
        kvbridge.nothing_of_ours  # noqa: B018
    assert kvbridge.__version__


HEAVY = ("torch", "transformers", "numpy", "datasets", "safetensors")


@pytest.mark.parametrize(
    "modules",
    [
        "kvbridge, kvbridge.errors",
        "kvbridge.codec, kvbridge.geometry, kvbridge.files, kvbridge.asset.manifest, "
        "kvbridge.cache.provenance",
    ],
)
def test_light_modules_load_nothing_heavy(modules):
    code = f"import sys, {modules}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
