"""The examples of CONTRIBUTING are run as they stand: each registers itself, and is then used.

Those of the evaluation and of the gates are run by `test_extending` in `tests/eval` and `tests/gates`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvbridge
from kvbridge import RepairPlan
from kvbridge.asset.maps import MAP_KINDS
from kvbridge.fitting.families import FAMILIES
from kvbridge.fitting.select import SELECTORS
from kvbridge.fitting.solve import SOLVERS
from tests.fitting.pairs import documents, fitted, receiver, sender

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text("utf-8")


def run(heading: str) -> dict[str, Any]:
    """What the example under a heading defines."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None, heading
    names: dict[str, Any] = {"__name__": "contributing"}
    exec(compile(code[1], heading, "exec", dont_inherit=True), names)
    return names


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """As they were, after each test."""
    made = {
        "pair-local": FAMILIES,
        "every-other": SELECTORS,
        "direct": SOLVERS,
        "half": MAP_KINDS,
    }
    for name, registry in made.items():
        monkeypatch.setitem(registry, name, None)
        del registry[name]


def test_a_family():
    run("A new map family")
    fit = fitted(family="pair-local")
    assert fit.translator.family == "pair-local"
    groups = fit.translator.maps.groups[1, "v"]
    assert [group.heads for group in groups] == [(0, 1), (2, 3)]


def test_a_selector():
    run("A new selector")
    fit = fitted(selection="every-other")
    assert all(len(fit.translator.maps.groups[layer, "k"][0].blocks) == 2 for layer in range(3))


def test_a_solver():
    run("A new solver")
    other, usual = fitted(solver="direct").translator, fitted(solver="cholesky").translator
    for name, tensor in usual.tensors.items():
        torch.testing.assert_close(other.tensors[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_kind_of_maps(tmp_path):
    kind = run("A new kind of maps")["HalfMaps"]
    fit = fitted()
    dense = fit.translator.maps
    maps = kind(dense.sender, dense.receiver, dense.features, dense.groups)
    translator = replace(fit.translator, maps=maps).to("cpu", torch.float16)
    kvbridge.save_asset(replace(fit, translator=translator), tmp_path / "asset")
    asset = kvbridge.load_asset(tmp_path / "asset")
    assert asset.translator.maps.kind == "half"
    bridge = kvbridge.Bridge(asset, sender=sender(), receiver=receiver())
    text = documents()[-1].text
    handoff = bridge.handoff(kvbridge.capture(sender(), text), text)
    assert handoff.decision.verdict == "use_approximate"


def test_an_engine():
    engine = run("A new engine")["CountingEngine"](receiver())
    fit, text = fitted(receiver_features="none"), documents()[-1].text
    bridge = kvbridge.Bridge(fit.translator, sender=sender(), receiver=engine)
    handoff = bridge.handoff(kvbridge.capture(sender(), text), text, repair=RepairPlan(tail=6))
    assert handoff.decision.verdict == "use_approximate"
    assert engine.computed_tokens == [handoff.cached, 4 + 5]
