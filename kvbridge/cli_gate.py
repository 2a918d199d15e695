"""`kvbridge gate`: calibrate a gate for an asset, and show what a calibration promises."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
gate = typer.Typer(help="Decide per request whether a translated cache may be used.", no_args_is_help=True)


@gate.command("calibrate")
def gate_calibrate(
    asset: Path,
    data: Annotated[
        str | None, typer.Option(help="A .jsonl, .parquet or .txt file, a folder, or a Hub dataset id.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Calibration folder; default: ASSET.gate.")] = None,
    alpha: Annotated[float, typer.Option(help="Risk of `use`: P(damaged | used).")] = 0.02,
    lenient: Annotated[float, typer.Option(help="Risk of `use_approximate`.")] = 0.1,
    delta: Annotated[float, typer.Option(help="1 − confidence of both.")] = 0.05,
    label: Annotated[str, typer.Option(help="next_token, continuation, lost_answer, loss_gap or kl.")] = "next_token",
    tau: Annotated[float | None, typer.Option(help="Limit of loss_gap and kl (nats), tokens of continuation.")] = None,
    tails: Annotated[str, typer.Option(help="Repair ladder: recomputed tail tokens, comma-separated.")] = "17",
    limit: Annotated[int | None, typer.Option(help="Texts to use at most.", min=1)] = None,
    sender: Annotated[str | None, typer.Option(help="Sender, where the manifest's id is not where it lies.")] = None,
    receiver: Annotated[str | None, typer.Option(help="Receiver, likewise.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = "cpu",
    as_json: Json = False,
) -> None:
    """Calibrate: signals, thresholds and their guarantee, from texts that the fit has not seen."""
    from kvbridge.asset import load_asset
    from kvbridge.bridge import Bridge
    from kvbridge.cli import say
    from kvbridge.cli_run import models_of
    from kvbridge.errors import UsageError
    from kvbridge.gates.calibrate import calibrate
    from kvbridge.gates.calibration import load_calibration, save_calibration
    from kvbridge.gates.config import GateConfig
    from kvbridge.repair import RepairPlan

    target = out or asset.with_name(asset.name + ".gate")
    try:
        plans = tuple(RepairPlan(tail=int(t)) for t in tails.split(","))
    except ValueError as error:
        raise UsageError(f"expected --tails like 17,49, found {tails!r}") from error
    config = GateConfig(label=label, tau=tau, alpha=alpha, lenient_alpha=max(alpha, lenient), delta=delta, plans=plans)
    if target.exists():
        raise UsageError(f"--out {target} exists; calibrations are never overwritten, choose another folder")
    loaded = load_asset(asset)
    ours, theirs = models_of(loaded, (sender, receiver), device)
    found = calibrate(
        Bridge(loaded, sender=ours, receiver=theirs), samples_of(data, label, limit), config,
        progress=lambda n: say(f"{n} requests read") if n % 320 < 32 else None,
    )  # fmt: skip
    save_calibration(found, target)
    show(load_calibration(target, loaded), loaded, target, as_json)


@gate.command("show")
def gate_show(
    asset: Path,
    calibration: Annotated[Path | None, typer.Option(help="Calibration folder; default: ASSET.gate.")] = None,
    as_json: Json = False,
) -> None:
    """Thresholds, guarantee, coverage, signals and their cost, and what would expire a calibration."""
    from kvbridge.asset import load_asset
    from kvbridge.gates.calibration import load_calibration

    loaded = load_asset(asset)
    target = calibration or asset.with_name(asset.name + ".gate")
    show(load_calibration(target, loaded), loaded, target, as_json)


def samples_of(data: str | None, label: str, limit: int | None) -> list[Any]:
    """Texts with several prompts each, or questions with their answer; the demo's held-out texts where DATA is None."""
    from kvbridge.errors import EvalError
    from kvbridge.eval.items import demo_rows, prompt_and_answers, read_raw
    from kvbridge.gates.passing import Sample

    raws = [*demo_rows("test"), *demo_rows("recall")] if data is None else list(read_raw(data))
    Random(0).shuffle(raws)
    found = []
    for raw in raws:
        text = raw.body.get("text")
        if isinstance(text, str) and label != "lost_answer":
            rng = Random(raw.id)
            wanted = sorted(rng.randint(160, 900) for _ in range(3))
            body = text[: wanted[-1] + 200]
            ends = {body.rfind(" ", 0, n) for n in wanted}
            found.append(Sample(raw.id, raw.document, body, tuple(sorted(e for e in ends if 0 < e < len(body) - 1))))
        elif not isinstance(text, str):
            try:
                prompt, answers = prompt_and_answers(raw)
            except EvalError:
                continue
            found.append(Sample(raw.id, raw.document, prompt + answers[0], (len(prompt),), answer=True))
    return found[:limit]


def show(found: Any, asset: Any, where: Path, as_json: bool) -> None:
    """A calibration for people or machines."""
    from kvbridge.cli import emit, table
    from kvbridge.cost import prefill_flops
    from kvbridge.gates.costs import PARTS, Shape
    from kvbridge.gates.reading import first_parameters
    from kvbridge.gates.signals import SIGNALS

    tokens = 2048
    manifest = asset.manifest
    plan = found.rungs[0].plan
    shape = Shape(
        manifest.sender, manifest.receiver, tokens, found.extras.basis_numbers, found.extras.halves_parameters,
        first_parameters(asset.translator, max(1, plan.layers)),
    )  # fmt: skip
    dense = prefill_flops(manifest.receiver, tokens)
    parts = sorted({p for s in found.signals for p in SIGNALS[s].parts})
    share = {p: PARTS[p](shape) / dense for p in parts}
    if as_json:
        body = found.body()
        emit({**body, "digest": found.digest, "gate_share_2048": sum(share.values()), "usable": found.usable})
        return
    print(f"{where}: digest {found.digest}")
    print(f"damage: {found.label}" + ("" if found.tau is None else f", τ = {found.tau:g}"))
    report = found.report
    rows = []
    for name, level, alpha in (
        ("use", found.strict, found.alpha),
        ("use_approximate", found.lenient, found.lenient_alpha),
    ):
        seen = report.get("strict" if name == "use" else "lenient")
        if level is None:
            rows.append([name, f"{alpha:.1%}", "none holds", "", "", ""])
        else:
            risk = seen and seen["risk_ci"]
            rows.append([
                name, f"{alpha:.1%}", f"{level.threshold:.4f}", f"{level.failures} of {level.items}",
                f"{seen['coverage']:.1%}" if seen else "–", f"{risk[0]:.1%} to {risk[1]:.1%}" if risk else "–",
            ])  # fmt: skip
    table(
        f"P(damaged | accepted) ≤ α at confidence {1 - found.delta:.0%}",
        ["verdict", "α", "threshold", "failures when set", "coverage, third part", "risk there, 95 %"], rows,
    )  # fmt: skip
    if not found.usable:
        print(found.refusal)
    scores = report.get("auroc", {})
    table(
        f"signals: AUROC for damage on the third part ({report.get('items', 0)} requests); all together {report.get('auroc_score')}",
        ["signal", "AUROC by column", f"share of a {tokens}-token prefill"],
        [
            [
                s, ", ".join(f"{c} {scores[c]:.2f}" for c in SIGNALS[s].columns if c in scores) or "–",
                " + ".join(f"{p} {share[p]:.2%}" for p in SIGNALS[s].parts) or "0",
            ]
            for s in found.signals
        ],
    )  # fmt: skip
    print(f"all signals together: {sum(share.values()):.2%} of a prefill of {tokens} tokens (shared parts once)")
    print(
        "expires with: another translator, either model's weights, tokenizer, dtype or adapter; another damage label or "
        "repair plan; requests unlike the calibration texts (digest " + found.corpus_digest[:12] + "…)"
    )
