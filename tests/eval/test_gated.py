"""`--gate`: gates that look at nothing, calibrations that are not there, and runs of another
gate."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

import kvbridge
from kvbridge import Bridge, RepairPlan
from kvbridge.asset.folder import load_asset
from kvbridge.cli.evaluate import EvalCommand, gate_for, run_eval
from kvbridge.errors import EvalError, UsageError
from kvbridge.eval.conditions.names import defaults
from kvbridge.eval.tasks.items import demo_rows
from kvbridge.gates.calibrate.config import CALIBRATION_SPLITS, GateConfig, split_of
from kvbridge.gates.calibrate.job import calibrate
from kvbridge.gates.calibrate.passing import Sample, watch
from kvbridge.gates.decide import CalibratedGate
from kvbridge.gates.decide.calibration import save_calibration


def run(
    asset: Path, out: Path, gate: str | None, conditions: tuple[str, ...] | None
) -> dict[str, dict[str, Any]]:
    """Rows by condition of one item."""
    run_eval(
        EvalCommand(
            asset, out, conditions=conditions, tasks=("recall",), limit=2, gate=gate, as_json=True
        )
    )
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text("utf-8").splitlines()]
    return {row["condition"]: row for row in rows if row["item"] == rows[0]["item"]}


def test_gates_that_look_at_nothing_are_the_two_ends(demo_asset: Path, tmp_path: Path) -> None:
    accepted = run(demo_asset, tmp_path / "accept", "always-accept", ("native", "translated"))
    assert accepted["gated"]["verdict"] == "use_approximate"
    assert accepted["gated"]["loss"] == pytest.approx(accepted["translated"]["loss"], rel=1e-4)
    refused = run(demo_asset, tmp_path / "refuse", "always-refuse", ("gated", "native"))
    assert (refused["gated"]["verdict"], refused["gated"]["reason"]) == ("discard", "gate_refused")
    assert refused["gated"]["loss"] == pytest.approx(refused["native"]["loss"], rel=1e-4)
    assert refused["gated"]["prefill_share"] > 1, "the attempt is paid for on top"
    assert "always-refuse" in (tmp_path / "refuse" / "report.html").read_text("utf-8")


def test_a_gate_adds_gated_to_the_default_conditions(demo_asset: Path, tmp_path: Path) -> None:
    assert set(run(demo_asset, tmp_path, "always-accept", None)) == {*defaults(), "gated"}


def test_another_gate_does_not_continue_a_run(demo_asset: Path, tmp_path: Path) -> None:
    run(demo_asset, tmp_path, "always-accept", ("native",))
    with pytest.raises(EvalError, match="pair"):
        run(demo_asset, tmp_path, "always-refuse", ("native",))
    with pytest.raises(EvalError, match="pair"):
        run(demo_asset, tmp_path, None, ("native",))


def test_a_missing_calibration_says_what_else_there_is(demo_asset: Path) -> None:
    for given in (None, "nowhere"):
        with pytest.raises(
            UsageError, match="kvbridge gate calibrate, or give --gate always-accept, always-refuse"
        ):
            gate_for(load_asset(demo_asset), given)


def test_gated_alone_shows_risk_over_coverage_on_documents_the_gate_has_not_seen(
    demo_asset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a calibration on the demo's texts to the curve in the report, as the two commands do
    it."""
    asset = load_asset(demo_asset)
    sender, receiver = kvbridge.load("demo:sender"), kvbridge.load("demo:receiver")
    rows = {row.document: row for row in demo_rows("recall")}
    parts: dict[str, list[Any]] = {name: [] for name in CALIBRATION_SPLITS}
    for row in rows.values():
        parts[split_of(row.document)].append(row)
    chosen = [row for some in parts.values() for row in some[:28]]
    samples = [Sample(r.id, r.document, r.body["context"], (260, 300)) for r in chosen]
    bridge = Bridge(asset, sender=sender, receiver=receiver)
    plan = GateConfig().plans[0]
    middle = median(
        seen.outcome.kl for seen in watch(bridge, samples, plan) if seen.outcome is not None
    )
    config = GateConfig(
        label="kl",
        tau=middle,
        alpha=0.6,
        lenient_alpha=0.9,
        delta=0.5,
        signals=("next_token", "length"),
    )
    calibration = calibrate(bridge, samples, config)
    save_calibration(calibration, tmp_path / "gate")
    monkeypatch.setattr(
        "kvbridge.cli.evaluate.demo_rows", lambda split: chosen if split == "recall" else []
    )
    run_eval(
        EvalCommand(
            demo_asset,
            tmp_path / "run",
            conditions=("gated",),
            gate=str(tmp_path / "gate"),
            as_json=True,
        )
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    written = [
        json.loads(line)
        for line in (tmp_path / "run" / "rows.jsonl").read_text("utf-8").splitlines()
    ]
    assert {row["condition"] for row in written} == {"gated", "native", "translated_tail17"}
    fresh = {row.document for row in parts["report"][:28]}
    assert {row["document"] for row in written if row["status"] == "ok"} == fresh
    left_out = {row["document"] for row in written if "calibrated on its document" in row["reason"]}
    assert left_out == {row.document for row in chosen} - fresh
    assert summary["gate"]["recall"]["aurc"] is not None
    assert "Risk" in (tmp_path / "run" / "report.html").read_text("utf-8")


def test_a_gate_is_not_judged_on_the_documents_it_was_made_of_alone(
    demo_asset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = CalibratedGate(None)
    monkeypatch.setattr(
        gate, "calibration", SimpleNamespace(knows=lambda document: True, digest="d", rungs=())
    )
    monkeypatch.setattr("kvbridge.cli.evaluate.gate_for", lambda asset, given: (gate, RepairPlan()))
    with pytest.raises(UsageError, match="every document"):
        run(demo_asset, tmp_path, "some", ("gated",))
