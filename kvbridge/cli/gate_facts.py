"""What is said of a calibration, as plain values: its promise, its signals, and what they cost."""

from __future__ import annotations

from typing import Any

from kvbridge.asset.folder import Asset
from kvbridge.gates.decide.sealed import Calibration
from kvbridge.gates.signals import SIGNALS, parts_of
from kvbridge.gates.signals.costs import Shape
from kvbridge.gates.signals.reading import factor_numbers
from kvbridge.handoff.cost import prefill_flops

TOKENS = 2048
EXPIRES = (
    "another translator (digest)",
    "a change of either model's weights, adapters, tokenizer, RoPE, settings or cache dtype "
    "(digests)",
    "another repair plan than the calibrated ones",
    "Policy.valid_until, where the caller sets it",
    "requests unlike the calibration texts (nothing detects this; calibrate on texts like those "
    "to come)",
)


def costs_of(calibration: Calibration, asset: Asset) -> dict[str, float]:
    """Counted FLOPs of each part of the gate's work over a prefill of TOKENS tokens."""
    manifest = asset.manifest
    shape = Shape(
        manifest.sender,
        manifest.receiver,
        TOKENS,
        factor_numbers(asset.factors),
        calibration.extras.halves_parameters,
        asset.translator.only(range(max(1, calibration.rungs[0].plan.layers))).flops(),
    )
    dense = prefill_flops(manifest.receiver, TOKENS)
    parts = parts_of(calibration.signals)
    return {name: parts[name].flops(shape) / dense for name in sorted(parts)}


def levels_of(calibration: Calibration) -> dict[str, dict[str, Any]]:
    """Both verdicts: α, threshold, what it was set on, and coverage and risk on the part that chose
    nothing. α of `use_approximate` bounds the risk of all accepted requests, `use` among them;
    `alone` is what was seen among those tagged with the verdict itself, on that part."""
    body = {}
    for verdict, name, alpha in (
        ("use", "strict", calibration.alpha),
        ("use_approximate", "lenient", calibration.lenient_alpha),
    ):
        level = calibration.strict if name == "strict" else calibration.lenient
        seen = calibration.report.get(name) or {}
        alone = calibration.report.get("strict" if name == "strict" else "approximate") or {}
        body[verdict] = {
            "alpha": alpha,
            "confidence": 1 - calibration.delta,
            "threshold": level and level.threshold,
            "accepted_when_set": level and level.items,
            "failures_when_set": level and level.failures,
            "p": level and level.p,
            "coverage": seen.get("coverage"),
            "risk_ci": seen.get("risk_ci"),
            "alone": {
                "tagged": alone.get("accepted"),
                "damaged": alone.get("damaged"),
                "risk_ci": alone.get("risk_ci"),
            },
        }
    return body


def damage_of(calibration: Calibration) -> dict[str, Any] | None:
    """How common damage is without a gate, on the report part; None where the calibration does not
    say."""
    if calibration.base_rate is None:
        return None
    damaged, requests = calibration.base_rate
    return {
        "part": "report",
        "requests": requests,
        "damaged": damaged,
        "share": damaged / requests,
    }


def signals_of(calibration: Calibration, shares: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Per signal how well its columns tell damage, and which parts of the gate's work it needs;
    `shares`: of a prefill, by part."""
    scores = calibration.report.get("auroc", {})
    signals = {}
    for name in calibration.signals:
        signal = SIGNALS[name]
        signals[name] = {
            "auroc": {column: scores.get(column) for column in signal.columns},
            "cost_share": {part.name: shares[part.name] for part in signal.parts},
            "about": signal.about,
        }
    return signals


def calibration_json(calibration: Calibration, asset: Asset) -> dict[str, Any]:
    """Everything, in plain JSON types."""
    shares = costs_of(calibration, asset)
    return {
        **calibration.body(),
        "digest": calibration.digest,
        "usable": calibration.usable,
        "levels": levels_of(calibration),
        "signal_table": signals_of(calibration, shares),
        "auroc_score": calibration.report.get("auroc_score"),
        "gate_share_2048": sum(shares.values()),
        "damage": damage_of(calibration),
        "expires_with": list(EXPIRES),
        "refusal": None if calibration.usable else calibration.refusal,
    }
