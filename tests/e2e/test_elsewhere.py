"""Models on a device that is not the CPU: nothing may meet a tensor that stayed behind, and every
number is the same."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import kvbridge
from kvbridge import Bridge, RepairPlan, demo
from kvbridge.cli.samples import samples_of
from kvbridge.eval.conditions.setup import Setup
from kvbridge.eval.run.evaluate import evaluate
from kvbridge.eval.run.latency import longest_text, measure_latency
from kvbridge.eval.screen.data import FleetData
from kvbridge.eval.screen.fleet import ScreenConfig, screen
from kvbridge.eval.tasks.chosen import make_items
from kvbridge.eval.tasks.items import demo_rows
from kvbridge.fitting.data import Document, read_documents
from kvbridge.gates.calibrate.config import GateConfig
from kvbridge.gates.calibrate.job import calibrate, gather, read_signals
from kvbridge.gates.calibrate.passing import watch
from kvbridge.gates.decide import CalibratedGate, Ladder
from kvbridge.gates.decide.calibration import load_calibration, save_calibration
from kvbridge.gates.decide.timing import measure
from kvbridge.gates.signals import SIGNALS
from tests.models import EXACT_KINDS, TEXT, tiny_causal, wrapped
from tests.pretend import THERE, Elsewhere, Pretend, mark, move

CONFIG = kvbridge.FitConfig(layers=3, max_tokens=128, lambdas=(1e-2,), cosine_documents=2)
PLANS = (RepairPlan(tail=5), RepairPlan(tail=17))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the device itself, not of its tensors."""
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 34, 1 << 34))


@cache
def there() -> tuple[Any, Any]:
    """The demo's sender and receiver, moved: loaded before Pretend, used under it."""
    pair = kvbridge.load("demo:sender"), kvbridge.load("demo:receiver")
    for model in pair:
        move(model.model)
    return pair


@cache
def here() -> tuple[Any, Any]:
    return kvbridge.load("demo:sender"), kvbridge.load("demo:receiver")


@cache
def documents() -> list[Document]:
    every, kept = (
        list(read_documents(str(demo.texts("train").parent))),
        {"train": 30, "validation": 8, "test": 6},
    )
    return [
        d for split, count in kept.items() for d in [x for x in every if x.split == split][:count]
    ]


@cache
def fitted(**changes: Any) -> Any:
    return kvbridge.fit(*here(), documents(), config=replace(CONFIG, **changes))


@cache
def asset_at(folder: Path) -> Any:
    kvbridge.save_asset(fitted(), folder / "asset")
    return kvbridge.load_asset(folder / "asset")


@pytest.fixture
def asset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return asset_at(tmp_path_factory.getbasetemp())


def test_the_pretence_refuses_what_a_device_refuses() -> None:
    far, near, rows = mark(torch.ones(3, 2)), torch.ones(3, 2), torch.tensor([0, 2])
    with Pretend():
        assert far.device == THERE
        assert (far.cpu() + near).device.type == "cpu"
        assert (near.to(THERE) @ far.T)[rows].device == THERE
        assert (far * torch.tensor(2.0)).device == THERE
        for work in (
            lambda: far + near,
            lambda: torch.cat((far, near)),
            lambda: near[mark(torch.tensor([0, 2]))],
            lambda: torch.where(near > 0, far, far),
            lambda: far.numpy(),
            lambda: torch.zeros(3, 2, device=THERE) + near,
        ):
            with pytest.raises(Elsewhere):
                work()


CHANGES: list[dict[str, Any]] = [
    {},
    {"family": "head-local", "receiver_features": "hidden:1"},
    {"receiver_features": "none", "solver": "eigh"},
    {"precision": "float64", "selection": "greedy", "one_at_a_time": True},
]


def alike(value: Any, expected: Any) -> bool:
    """Equal but for rounding: a copy may lie otherwise in memory than a view, and sums then round
    otherwise."""
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            alike(value[k], v) for k, v in expected.items()
        )
    if isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(alike, value, expected))
    return bool(
        value
        == (
            pytest.approx(expected, rel=1e-3, abs=1e-4) if isinstance(expected, float) else expected
        )
    )


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_fit(changes: dict[str, Any]) -> None:
    expected, pair = fitted(**changes), there()
    with Pretend():
        fit = kvbridge.fit(*pair, documents(), config=replace(CONFIG, **changes))
    assert alike(fit.scores.to_json(), expected.scores.to_json())
    for name, tensor in expected.translator.tensors.items():
        if name.endswith(".W"):
            torch.testing.assert_close(fit.translator.tensors[name], tensor, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", EXACT_KINDS)
def test_an_exact_handoff_of_every_kind(kind: str) -> None:
    model = wrapped(tiny_causal(kind))
    ids = model.encode(TEXT).ids[None]
    plain = model.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False
    )
    move(model.model)
    with Pretend():
        handoff = Bridge(None, sender=model, receiver=model).handoff(
            kvbridge.capture(model, TEXT), TEXT
        )
        assert handoff.decision.reason == "exact"
        assert handoff.generate(4, do_sample=False).tolist() == plain.tolist()


def test_a_gate_and_its_signals(asset: Any, tmp_path: Path) -> None:
    samples = samples_of(None, "kl", 60, asset.manifest.knows)
    prose = [s for s in samples if not s.answer]

    def read(sender: Any, receiver: Any) -> list[Any]:
        bridge = Bridge(asset, sender=sender, receiver=receiver)
        extras = gather(bridge, prose[:6], PLANS[1])
        return [
            (read_signals(s.evidence, extras), vars(s.outcome))
            for s in watch(bridge, prose[6:9], PLANS[1])
            if s.evidence is not None
        ]

    expected, (sender, receiver) = read(*here()), there()
    config = GateConfig(
        label="kl", tau=0.5, alpha=0.3, lenient_alpha=0.5, plans=PLANS, signals=tuple(SIGNALS)
    )
    text = prose[0].text[:300]
    with Pretend():
        assert alike(read(sender, receiver), expected)
        bridge = Bridge(asset, sender=sender, receiver=receiver)
        save_calibration(calibrate(bridge, samples, config), tmp_path / "gate")
        calibration = load_calibration(tmp_path / "gate", asset)
        ladder = Ladder(asset, sender=sender, receiver=receiver, calibration=calibration)
        handoff = ladder.handoff(kvbridge.capture(sender, text), text)
        assert handoff.generate(3, do_sample=False).shape[1] == len(handoff.ids) + 3
        long = longest_text(receiver, [s.text for s in prose], 100)
        timing = measure(
            bridge,
            calibration.extras,
            long,
            plan=PLANS[0],
            signals=calibration.signals,
            tokens=90,
            repeats=1,
        )
        assert set(timing.signals_ms) == set(calibration.signals)
        assert measure_latency(bridge, long, lengths=(64,), repeats=1)


def test_every_condition_of_an_evaluation(asset: Any, tmp_path: Path) -> None:
    controls = kvbridge.load_controls(asset)
    items, _ = make_items([*demo_rows("test"), *demo_rows("recall")], *here(), limit=3, tasks=None)

    def rows(out: Path, *models: Any) -> list[dict[str, Any]]:
        setup = Setup.of(asset, controls, *models, gate=CalibratedGate(None))
        path = evaluate(setup, items, out)
        return [
            {k: v for k, v in json.loads(line).items() if k != "ttft_ms"}
            for line in path.read_text().splitlines()
        ]

    expected, pair = rows(tmp_path / "here", *here()), there()
    with Pretend():
        measured = rows(tmp_path / "there", *pair)
    assert alike(measured, expected)
    assert {row["status"] for row in measured} == {"ok"}, [row["reason"] for row in measured]


def test_a_screening(tmp_path: Path) -> None:
    pair = list(there())
    with Pretend():
        result = screen(
            pair,
            FleetData(documents(), list(demo_rows("test"))),
            tmp_path,
            ScreenConfig(fit=CONFIG, items=4, predict_only=True, latency=False),
            say=lambda _: None,
        )
    assert len(result["pairs"]) == 2
