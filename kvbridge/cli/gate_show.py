"""What `kvbridge gate` prints: a calibration's promise, and what its signals cost."""

from __future__ import annotations

from pathlib import Path

from kvbridge.asset.folder import Asset
from kvbridge.cli.gate_facts import (
    EXPIRES,
    TOKENS,
    calibration_json,
    costs_of,
    levels_of,
    signals_of,
)
from kvbridge.cli.output import emit, table
from kvbridge.gates.calibrate.config import CALIBRATION_SPLITS
from kvbridge.gates.decide.sealed import Calibration
from kvbridge.gates.decide.timing import Timing
from kvbridge.gates.labels import LABELS
from kvbridge.gates.signals import DEFAULT_SIGNALS
from kvbridge.gates.signals.costs import BUDGET

PROMISED = {"use": "use", "use_approximate": "all accepted"}


def show(calibration: Calibration, asset: Asset, where: Path, as_json: bool) -> None:
    """A calibration for people or machines."""
    if as_json:
        emit(calibration_json(calibration, asset))
        return
    print(f"{where}: digest {calibration.digest}, of translator {calibration.translator[:12]}…")
    _show_origin(calibration)
    _show_levels(calibration)
    print()
    _show_signals(calibration, asset)
    print(
        f"expires with: {'; '.join(EXPIRES)}; calibration texts: digest "
        f"{calibration.corpus_digest[:12]}…"
    )


def _show_origin(calibration: Calibration) -> None:
    """What counts as damage, which repairs it is for, and how many requests it was made of."""
    limit = "" if calibration.tau is None else f", τ = {calibration.tau:g}"
    print(f"damage: {calibration.label}{limit} ({LABELS[calibration.label].about})")
    plans = []
    for rung in calibration.rungs:
        plan = rung.plan
        plans.append(f"sinks {plan.sinks}, tail {plan.tail}, layers {plan.layers}")
    print("repair plans: " + "; ".join(plans))
    parts = []
    for part in CALIBRATION_SPLITS:
        if part in calibration.counts:
            seen = _seen(calibration) if part == "report" else ""
            parts.append(f"{part} {calibration.counts[part]}{seen}")
    print("requests by part: " + ", ".join(parts))


def _seen(calibration: Calibration) -> str:
    """How many requests of the report part were damaged."""
    if calibration.base_rate is None:
        return ""
    damaged, requests = calibration.base_rate
    return f" ({damaged} damaged, {damaged / requests:.0%})"


def _show_levels(calibration: Calibration) -> None:
    """The thresholds and their guarantee, and what is not promised."""
    levels = levels_of(calibration)
    rows = []
    for verdict, level in levels.items():
        threshold, risk, coverage = level["threshold"], level["risk_ci"], level["coverage"]
        failures = f"{level['failures_when_set']} of {level['accepted_when_set']}"
        rows.append(
            [
                PROMISED[verdict],
                f"{level['alpha']:.1%}",
                "none holds" if threshold is None else f"{threshold:.4f}",
                "" if threshold is None else failures,
                "–" if coverage is None else f"{coverage:.1%}",
                f"{risk[0]:.1%} to {risk[1]:.1%}" if risk else "–",
            ]
        )
    title = f"P(damaged | among) ≤ α at confidence {1 - calibration.delta:.0%}"
    if calibration.base_rate is not None:
        damaged, requests = calibration.base_rate
        title += f"; {damaged / requests:.0%} damaged without a gate"
    table(title, ["among", "α", "threshold", "failures", "coverage", "risk, 95 %"], rows)
    print(
        "all accepted: use and use_approximate together; failures: when the threshold was set; "
        "coverage, risk and damage without a gate: report part"
    )
    alone = levels["use_approximate"]["alone"]
    if alone["tagged"] is not None:
        risk = alone["risk_ci"]
        spread = f" ({risk[0]:.1%} to {risk[1]:.1%}, 95 %)" if risk else ""
        print(
            f"tagged use_approximate, on the report part: {alone['damaged']} of {alone['tagged']} "
            f"damaged{spread}; nothing is promised of these alone"
        )
    if len(calibration.rungs) > 1:
        print(
            "ladder: a request ends on the first plan with a score of at most "
            f"{calibration.stop:.4f}"
        )
    if not calibration.usable:
        print(calibration.refusal)
    elif calibration.strict is None:
        print(
            f"`use` at α = {calibration.alpha:g} takes {calibration.needed} accepted requests "
            "without a failure"
        )
    if calibration.conformal is not None:
        print(
            f"conformal risk control: P(accepted and damaged) ≤ {calibration.alpha:g} on average "
            f"at threshold {calibration.conformal:.4f}"
        )


def _show_signals(calibration: Calibration, asset: Asset) -> None:
    """How well each signal tells damage, and what it costs."""
    shares = costs_of(calibration, asset)
    rows = []
    for name, signal in signals_of(calibration, shares).items():
        told = [f"{c} {value:.2f}" for c, value in signal["auroc"].items() if value is not None]
        costs = [f"{part} {share:.2%}" for part, share in signal["cost_share"].items()]
        rows.append([name, ", ".join(told) or "–", " + ".join(costs) or "0"])
    damaged = "" if calibration.base_rate is None else f", {calibration.base_rate[0]} damaged"
    print(
        "signals: AUROC for damage on the report part "
        f"({calibration.report.get('items', 0)} requests{damaged}); all together "
        f"{calibration.report.get('auroc_score')}"
    )
    table("", ["signal", "AUROC by column", f"share of a {TOKENS}-token prefill"], rows)
    print("An AUROC below 0.5 means that high values go with less damage.")
    print(
        f"all signals together: {sum(shares.values()):.2%} of a prefill of {TOKENS} tokens (shared "
        "parts once)"
    )


def show_timing(timing: Timing, as_json: bool) -> None:
    """Measured times for people or machines."""
    if as_json:
        emit(timing.to_json())
        return
    rows = [["prefill", f"{timing.prefill_ms:.1f}", "100 %"]]
    for name, ms in {"handoff": timing.handoff_ms, **timing.signals_ms}.items():
        rows.append([name, f"{ms:.1f}", f"{ms / timing.prefill_ms:.2%}"])
    title = f"{timing.tokens} tokens, {timing.threads} thread(s), median of {timing.repeats}"
    table(title, ["what", "ms", "share of prefill"], rows)
    print(
        f"all signals: {timing.gate_ms:.1f} ms, {timing.gate_share:.2%} of a prefill measured, "
        f"{timing.gate_flops_share:.2%} counted"
    )
    missing = [name for name in DEFAULT_SIGNALS if name not in timing.signals_ms]
    which = "default signals alone"
    if missing:
        which = f"default signals without {', '.join(missing)} (not in the calibration)"
    text = (
        f"{which}: {timing.default_ms:.1f} ms, {timing.default_share:.2%} of a prefill measured, "
        f"{timing.default_flops / timing.prefill_flops:.2%} counted"
    )
    if timing.tokens >= TOKENS:
        text += f": {timing.default_share / BUDGET:.0%} of a budget of {BUDGET:.0%}"
    print(text)
