"""What CONTRIBUTING says of a new gate, signal and label, run as it stands there."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import kvbridge
from kvbridge import RepairPlan
from kvbridge.cli.main import main
from kvbridge.gates.calibrate import job
from kvbridge.gates.calibrate.config import GateConfig
from kvbridge.gates.calibrate.job import calibrate
from kvbridge.gates.calibrate.passing import Sample, watch
from kvbridge.gates.decide import CalibratedGate, load_calibration, save_calibration
from kvbridge.gates.decide.timing import measure
from kvbridge.gates.labels import LABELS, Label
from kvbridge.gates.labels.outcomes import Outcome
from kvbridge.gates.signals import SIGNALS
from tests.models import random_texts

ROOT = Path(__file__).parents[2]
SPLITS = ("statistics", "score", "thresholds", "report")


def written(heading: str) -> dict[str, Any]:
    """What the code under a heading of CONTRIBUTING defines."""
    section = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition(f"\n## {heading}\n")[2]
    code = re.search(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    assert code is not None, heading
    names: dict[str, Any] = {"kvbridge": kvbridge, "LABELS": LABELS}
    names |= {"Label": Label, "Outcome": Outcome}
    exec(code[1], names)
    return names


def test_a_gate(pair):
    gate = written("A gate")["KnownTailGate"]()
    text = pair.texts[0]
    snapshot = kvbridge.capture(pair.sender, text)
    decision = pair.bridge(gate).handoff(snapshot, text, repair=RepairPlan(tail=9)).decision
    assert decision.reason in ("gate_lenient", "gate_refused")
    assert decision.score > 0


def test_a_signal_and_a_label_need_nothing_else(pair, tmp_path, monkeypatch, capsys):
    """Registered from outside, both go through calibration, file, decision, `gate show` and
    timing."""
    monkeypatch.setitem(SIGNALS, "value_spread", written("A new gate signal")["VALUE_SPREAD"])
    monkeypatch.setitem(LABELS, "drift", None)  # taken out again at the end
    written("A new label of damage")
    monkeypatch.setattr(job, "split_of", lambda document: SPLITS[int(document) % 4])
    samples = [
        Sample(str(i), str(i), text, tuple(range(80, 240, 11))) for i, text in enumerate(pair.texts)
    ]
    plan = RepairPlan(sinks=2, tail=11)
    outcomes = [seen.outcome for seen in watch(pair.bridge(), samples, plan)]
    middle = median(outcome.kl + outcome.gap for outcome in outcomes)
    config = GateConfig(
        label="drift",
        tau=middle,
        alpha=0.3,
        lenient_alpha=0.9,
        delta=0.3,
        signals=("value_spread", "length"),
        plans=(plan,),
    )
    assert GateConfig(label="drift").limit == 0.2
    made = calibrate(pair.bridge(), samples, config)
    folder = tmp_path / "gate"
    save_calibration(made, folder)
    calibration = load_calibration(folder, pair.asset)
    assert calibration.signals == ("value_spread", "length")
    assert (calibration.label, calibration.tau) == ("drift", middle)

    records = []
    gate = CalibratedGate(calibration, log=records.append)
    text = pair.texts[0]
    snapshot = kvbridge.capture(pair.sender, text)
    handoff = pair.bridge(gate).handoff(snapshot, text, repair=calibration.rungs[0].plan)
    assert math.isfinite(records[0]["signals"]["value_spread"])
    last = pair.receiver.geometry.layers[-1].stream("v")
    assert records[0]["gate_flops"] == 2 * last.features * len(handoff.ids)

    command = ["kvbridge", "gate", "show", pair.asset.path, "--calibration", folder, "--json"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    shown = json.loads(capsys.readouterr().out)
    assert shown["signal_table"]["value_spread"]["cost_share"]["value_norms"] > 0

    timing = measure(
        pair.bridge(),
        calibration.extras,
        " ".join(random_texts(8, 260, seed=2)),
        plan=calibration.rungs[0].plan,
        signals=calibration.signals,
        tokens=200,
        repeats=1,
    )
    assert set(timing.signals_ms) == {"value_spread", "length"}
