"""What `kvbridge gate` prints: a calibration's promise, and what its signals cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbridge.asset.folder import Asset
from kvbridge.cli.output import emit, table
from kvbridge.gates.calibrate.config import CALIBRATION_SPLITS
from kvbridge.gates.decide.sealed import Calibration
from kvbridge.gates.decide.timing import Timing
from kvbridge.gates.labels import LABELS
from kvbridge.gates.signals import DEFAULT_SIGNALS, SIGNALS, parts_of
from kvbridge.gates.signals.costs import BUDGET, Shape
from kvbridge.gates.signals.reading import factor_numbers
from kvbridge.handoff.cost import prefill_flops

TOKENS = 2048
PROMISED = {"use": "use", "use_approximate": "all accepted"}
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
    rate = calibration.base_rate
    return (
        None
        if rate is None
        else {"part": "report", "requests": rate[1], "damaged": rate[0], "share": rate[0] / rate[1]}
    )


def show(calibration: Calibration, asset: Asset, where: Path, as_json: bool) -> None:
    """A calibration for people or machines."""
    share, scores = costs_of(calibration, asset), calibration.report.get("auroc", {})
    signals: dict[str, dict[str, Any]] = {
        s: {
            "auroc": {c: scores.get(c) for c in SIGNALS[s].columns},
            "cost_share": {p.name: share[p.name] for p in SIGNALS[s].parts},
            "about": SIGNALS[s].about,
        }
        for s in calibration.signals
    }
    if as_json:
        emit(
            {
                **calibration.body(),
                "digest": calibration.digest,
                "usable": calibration.usable,
                "levels": levels_of(calibration),
                "signal_table": signals,
                "auroc_score": calibration.report.get("auroc_score"),
                "gate_share_2048": sum(share.values()),
                "damage": damage_of(calibration),
                "expires_with": list(EXPIRES),
                "refusal": None if calibration.usable else calibration.refusal,
            }
        )
        return
    limit = "" if calibration.tau is None else f", τ = {calibration.tau:g}"
    print(f"{where}: digest {calibration.digest}, of translator {calibration.translator[:12]}…")
    print(f"damage: {calibration.label}{limit} ({LABELS[calibration.label].about})")
    print(
        "repair plans: "
        + "; ".join(
            f"sinks {r.plan.sinks}, tail {r.plan.tail}, layers {r.plan.layers}"
            for r in calibration.rungs
        )
    )
    rate = calibration.base_rate
    seen = "" if rate is None else f" ({rate[0]} damaged, {rate[0] / rate[1]:.0%})"
    print(
        "requests by part: "
        + ", ".join(
            f"{part} {calibration.counts[part]}{seen if part == 'report' else ''}"
            for part in CALIBRATION_SPLITS
            if part in calibration.counts
        )
    )
    levels(calibration)
    if not calibration.usable:
        print(calibration.refusal)
    elif calibration.strict is None:
        print(
            f"`use` at α = {calibration.alpha:g} takes {calibration.needed} accepted requests without a failure"
        )
    if calibration.conformal is not None:
        print(
            f"conformal risk control: P(accepted and damaged) ≤ {calibration.alpha:g} on average at "
            f"threshold {calibration.conformal:.4f}"
        )
    print()
    print(
        f"signals: AUROC for damage on the report part ({calibration.report.get('items', 0)} requests"
        f"{'' if rate is None else f', {rate[0]} damaged'}); all together "
        f"{calibration.report.get('auroc_score')}"
    )
    table(
        "",
        ["signal", "AUROC by column", f"share of a {TOKENS}-token prefill"],
        [
            [
                s,
                ", ".join(f"{c} {v:.2f}" for c, v in body["auroc"].items() if v is not None) or "–",
                " + ".join(f"{p} {v:.2%}" for p, v in body["cost_share"].items()) or "0",
            ]
            for s, body in signals.items()
        ],
    )
    print("An AUROC below 0.5 means that high values go with less damage.")
    print(
        f"all signals together: {sum(share.values()):.2%} of a prefill of {TOKENS} tokens (shared "
        "parts once)"
    )
    print(
        f"expires with: {'; '.join(EXPIRES)}; calibration texts: digest {calibration.corpus_digest[:12]}…"
    )


def levels(calibration: Calibration) -> None:
    """The table of thresholds and their guarantee."""
    rows = []
    for verdict, level in levels_of(calibration).items():
        threshold, risk, coverage = level["threshold"], level["risk_ci"], level["coverage"]
        rows.append(
            [
                PROMISED[verdict],
                f"{level['alpha']:.1%}",
                "none holds" if threshold is None else f"{threshold:.4f}",
                ""
                if threshold is None
                else f"{level['failures_when_set']} of {level['accepted_when_set']}",
                "–" if coverage is None else f"{coverage:.1%}",
                f"{risk[0]:.1%} to {risk[1]:.1%}" if risk else "–",
            ]
        )
    rate = calibration.base_rate
    table(
        f"P(damaged | among) ≤ α at confidence {1 - calibration.delta:.0%}"
        + ("" if rate is None else f"; {rate[0] / rate[1]:.0%} damaged without a gate"),
        ["among", "α", "threshold", "failures", "coverage", "risk, 95 %"],
        rows,
    )
    print(
        "all accepted: use and use_approximate together; failures: when the threshold was set; "
        "coverage, risk and damage "
        "without a gate: report part"
    )
    alone = levels_of(calibration)["use_approximate"]["alone"]
    if alone["tagged"] is not None:
        risk = alone["risk_ci"]
        spread = f" ({risk[0]:.1%} to {risk[1]:.1%}, 95 %)" if risk else ""
        print(
            f"tagged use_approximate, on the report part: {alone['damaged']} of {alone['tagged']} "
            f"damaged{spread}; "
            "nothing is promised of these alone"
        )
    if len(calibration.rungs) > 1:
        print(
            f"ladder: a request ends on the first plan with a score of at most {calibration.stop:.4f}"
        )


def show_timing(timing: Timing, as_json: bool) -> None:
    """Measured times for people or machines."""
    if as_json:
        emit(timing.to_json())
        return
    rows = [
        [name, f"{ms:.1f}", f"{ms / timing.prefill_ms:.2%}"]
        for name, ms in timing.signals_ms.items()
    ]
    table(
        f"{timing.tokens} tokens, {timing.threads} thread(s), median of {timing.repeats}",
        ["what", "ms", "share of prefill"],
        [
            ["prefill", f"{timing.prefill_ms:.1f}", "100 %"],
            ["handoff", f"{timing.handoff_ms:.1f}", f"{timing.handoff_ms / timing.prefill_ms:.2%}"],
            *rows,
        ],
    )
    print(
        f"all signals: {timing.gate_ms:.1f} ms, {timing.gate_share:.2%} of a prefill measured, "
        f"{timing.gate_flops_share:.2%} counted"
    )
    missing = [name for name in DEFAULT_SIGNALS if name not in timing.signals_ms]
    which = (
        "default signals alone"
        if not missing
        else f"default signals without {', '.join(missing)} (not in the calibration)"
    )
    said = (
        f"{which}: {timing.default_ms:.1f} ms, {timing.default_share:.2%} of a prefill measured, "
    )
    said += f"{timing.default_flops / timing.prefill_flops:.2%} counted"
    if timing.tokens >= TOKENS:
        said += f": {timing.default_share / BUDGET:.0%} of a budget of {BUDGET:.0%}"
    print(said)
