"""Modules under their old names."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec

import pytest

from kvbridge.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_every_new_name_is_a_module_and_every_old_one_is_free(old):
    assert find_spec(f"kvbridge.{MOVED[old]}") is not None
    sys.modules.pop(f"kvbridge.{old}", None)
    with pytest.warns(DeprecationWarning, match=MOVED[old]):
        module = importlib.import_module(f"kvbridge.{old}")
    new = importlib.import_module(f"kvbridge.{MOVED[old]}")
    assert module is new
    assert module.__name__ == module.__spec__.name == f"kvbridge.{MOVED[old]}"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("old", "names"),
    [
        ("gates.policy", ("CalibratedGate", "Ladder", "Policy")),
        ("gates.calibration", ("load_calibration",)),
        ("gates.audit", ("JsonLines",)),
        ("gates.reading", ("Reading",)),
        ("cost", ("Speed",)),
        ("translator", ("Block",)),
        ("registry.catalog", ("Catalog",)),
    ],
)
def test_what_the_pages_told_people_to_import_is_there_under_the_old_name(old, names):
    module = importlib.import_module(f"kvbridge.{old}")
    assert all(hasattr(module, name) for name in names)


def test_unknown_names_stay_unknown():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("kvbridge.absent")


def test_importing_the_package_loads_no_torch_and_warns_of_nothing():
    code = "import sys, kvbridge; from kvbridge.asset import manifest; sys.exit('torch' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", code], check=False
    )
    assert ran.returncode == 0
