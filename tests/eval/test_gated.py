"""`--gate`: gates that look at nothing, calibrations that are not there, and runs of another gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbridge.asset import load_asset
from kvbridge.cli_run import gate_for, run_eval
from kvbridge.errors import EvalError, UsageError
from kvbridge.eval.plans import DEFAULT


def run(asset: Path, out: Path, gate: str | None, conditions: tuple[str, ...] | None) -> dict[str, dict[str, Any]]:
    """Rows by condition of one item."""
    run_eval(asset, None, out, conditions, ("recall",), 2, None, gate, (None, None), "cpu", 1, True)
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
    assert set(run(demo_asset, tmp_path, "always-accept", None)) == {*DEFAULT, "gated"}


def test_another_gate_does_not_continue_a_run(demo_asset: Path, tmp_path: Path) -> None:
    run(demo_asset, tmp_path, "always-accept", ("native",))
    with pytest.raises(EvalError, match="pair"):
        run(demo_asset, tmp_path, "always-refuse", ("native",))
    with pytest.raises(EvalError, match="pair"):
        run(demo_asset, tmp_path, None, ("native",))


def test_a_missing_calibration_says_what_else_there_is(demo_asset: Path) -> None:
    for given in (None, "nowhere"):
        with pytest.raises(UsageError, match="kvbridge gate calibrate, or give --gate always-accept, always-refuse"):
            gate_for(load_asset(demo_asset), given)
