"""A tiny pair with an asset, statistics and a calibration, made once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import kvbridge
from kvbridge import Bridge, RepairPlan
from kvbridge.gates.calibrate.job import gather
from kvbridge.gates.calibrate.passing import Sample
from kvbridge.gates.decide.calibration import load_calibration, save_calibration
from kvbridge.gates.decide.guarantee import Tested
from kvbridge.gates.decide.score import Score
from kvbridge.gates.decide.sealed import Calibration
from kvbridge.gates.decide.sealed import Rung as RungOf
from kvbridge.gates.signals import SIGNALS
from kvbridge.gates.signals.extras import Extras
from kvbridge.geometry import short_name
from kvbridge.handoff import stages
from kvbridge.handoff.evidence import Evidence
from kvbridge.handoff.request import Request
from tests.models import random_texts, tiny

PLAN = RepairPlan(sinks=2, tail=11)
COLUMNS = tuple(c for s in SIGNALS.values() for c in s.columns)


@dataclass(frozen=True, eq=False)
class Pair:
    """Models, asset, statistics, and texts that the fit has not seen."""

    sender: Any
    receiver: Any
    asset: Any
    extras: Extras
    texts: list[str]

    def bridge(self, gate: Any = None) -> Bridge:
        return Bridge(self.asset, sender=self.sender, receiver=self.receiver, gate=gate)

    def evidence(
        self,
        snapshot: Any = None,
        text: str | None = None,
        plan: RepairPlan = PLAN,
        known: Any = None,
    ) -> Evidence:
        """What a gate sees of one request."""
        text = text or self.texts[0]
        snapshot = snapshot if snapshot is not None else kvbridge.capture(self.sender, text)
        bridge = self.bridge()
        encoding = bridge.pair.receiver.encode(text)
        request = Request(snapshot, text, encoding, plan, known, observed=True)
        prepared = bridge.prepare([request])
        (request,) = stages.repair(bridge.pair, prepared)
        assert request.refusal is None, str(request.refusal)
        return Evidence(bridge.pair, request)

    def wrong(self) -> tuple[Any, str]:
        """A snapshot of the first text's ids with another text's content."""
        right, other = (kvbridge.capture(self.sender, t) for t in self.texts[:2])
        count = min(len(right), len(other))
        right = right.select(torch.arange(count)) if count < len(right) else right
        return replace(
            right, layers=tuple({n: t[:count] for n, t in x.items()} for x in other.layers)
        ), self.texts[0]


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> Pair:
    torch.set_num_threads(1)
    sender, receiver = tiny("llama", 0), tiny("llama", 1)
    texts = random_texts(60, 260, seed=4)
    rows = [
        {
            "id": str(i),
            "text": t,
            "split": "validation" if i % 5 == 3 else "test" if i % 5 == 4 else "train",
        }
        for i, t in enumerate(texts[:40])
    ]
    config = kvbridge.FitConfig(layers=2, max_tokens=120, force=True, cosine_documents=0)
    folder = tmp_path_factory.mktemp("pair") / "asset"
    kvbridge.save_asset(kvbridge.fit(sender, receiver, rows, config=config), folder)
    asset = kvbridge.load_asset(folder)
    bridge = Bridge(asset, sender=sender, receiver=receiver)
    extras = gather(
        bridge, [Sample(str(i), str(i), t, (len(t) - 40,)) for i, t in enumerate(texts[:12])], PLAN
    )
    return Pair(sender, receiver, asset, extras, texts[40:])


def made_calibration(pair: Pair, **changes: Any) -> Calibration:
    """A calibration whose score is constant at one half and whose thresholds accept it."""
    count = len(COLUMNS)
    score = Score(COLUMNS, (0.0,) * count, (1.0,) * count, (0.0,) * count, 0.0)
    passed = Tested(0.6, 400, 1, 0.01)
    manifest = pair.asset.manifest
    body: dict[str, Any] = {
        "translator": pair.asset.digest,
        "sender": manifest.sender.digest,
        "receiver": manifest.receiver.digest,
        "label": "next_token",
        "tau": None,
        "alpha": 0.02,
        "lenient_alpha": 0.1,
        "delta": 0.05,
        "signals": tuple(SIGNALS),
        "rungs": (RungOf(PLAN, score, {"sender_first": -2.0}),),
        "stop": 1.0,
        "strict": None,
        "lenient": passed,
        "conformal": 0.3,
        "needed": 149,
        "counts": {"score": 10, "thresholds": 400, "report": 20},
        "report": {"items": 20},
        "corpus_digest": "c",
        "documents": frozenset({short_name("d0")}),
        "extras": pair.extras,
    }
    return Calibration(**{**body, **changes})


@pytest.fixture
def saved(pair, tmp_path):
    """(folder, calibration as loaded)."""
    folder = tmp_path / "gate"
    save_calibration(made_calibration(pair), folder)
    return folder, load_calibration(folder, pair.asset)
