"""`kvbridge gate`: calibrate a gate for an asset, and show what a calibration promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from kvbridge.format import CALIBRATION

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def _share(value: float) -> float:
    """A risk or a confidence, checked before anything is imported for it: typer knows closed intervals only."""
    if not 0 < value < 1:
        raise typer.BadParameter(f"expected a number between 0 and 1, found {value:g}")
    return value


gate = typer.Typer(
    help="Decide per request whether a translated cache may be used.", no_args_is_help=True
)


@gate.command("calibrate")
def gate_calibrate(
    asset: Path,
    data: Annotated[
        str | None,
        typer.Option(help="A .jsonl, .parquet or .txt file, a folder, or a Hub dataset id."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Calibration folder; default: ASSET.gate.")
    ] = None,
    alpha: Annotated[
        float, typer.Option(help="Risk of `use`: P(damaged | `use`).", callback=_share)
    ] = 0.02,
    lenient: Annotated[
        float,
        typer.Option(
            help="Risk of all accepted requests, `use` and `use_approximate` together; not of those tagged `use_approximate` alone. A ladder stops climbing at this risk.",
            callback=_share,
        ),
    ] = 0.1,
    delta: Annotated[float, typer.Option(help="1 − confidence of both.", callback=_share)] = 0.05,
    label: Annotated[
        str, typer.Option(help="next_token, continuation, lost_answer, loss_gap or kl.")
    ] = "next_token",
    tau: Annotated[
        float | None,
        typer.Option(
            help="Limit of loss_gap and kl (nats), tokens of continuation.", min=0, max=1e6
        ),
    ] = None,
    tails: Annotated[
        str, typer.Option(help="Repair ladder: recomputed tail tokens, comma-separated.")
    ] = "17",
    signals: Annotated[
        str | None,
        typer.Option(
            help="Signals to use, comma-separated, or `all`; default: all that together take under 2 % of the FLOPs of a 2,048-token prefill."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Texts to use at most.", min=1)] = None,
    sender: Annotated[
        str | None, typer.Option(help="Sender, where the manifest's id is not where it lies.")
    ] = None,
    receiver: Annotated[str | None, typer.Option(help="Receiver, likewise.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = "cpu",
    as_json: Json = False,
) -> None:
    """Calibrate: signals, thresholds and their guarantee, from texts that the fit has not seen."""
    from kvbridge.asset.folder import load_asset
    from kvbridge.cli.checks import check_out
    from kvbridge.cli.gate_show import show
    from kvbridge.cli.output import say
    from kvbridge.cli.progress import counted
    from kvbridge.cli.run import models_of
    from kvbridge.errors import UsageError
    from kvbridge.fitting.data import check_data
    from kvbridge.gates.calibrate.config import GateConfig
    from kvbridge.gates.calibrate.job import calibrate, parted
    from kvbridge.gates.decide.calibration import load_calibration, save_calibration
    from kvbridge.gates.signals import DEFAULT, SIGNALS
    from kvbridge.handoff.bridge import Bridge
    from kvbridge.handoff.plan import RepairPlan

    target = out or CALIBRATION.beside(asset)
    try:
        plans = tuple(RepairPlan(tail=int(t)) for t in tails.split(","))
    except ValueError as error:
        raise UsageError(f"expected --tails like 17,49, found {tails!r}") from error
    chosen = (
        DEFAULT
        if signals is None
        else tuple(SIGNALS)
        if signals == "all"
        else tuple(signals.split(","))
    )
    config = GateConfig(
        label=label,
        tau=tau,
        alpha=alpha,
        lenient_alpha=max(alpha, lenient),
        delta=delta,
        plans=plans,
        signals=chosen,
    )
    check_out(target, new="calibrations")
    if data is not None:
        check_data(data)
    loaded = load_asset(asset)
    samples = samples_of(data, label, limit, loaded.manifest.knows)
    parts = parted(samples, config)
    ours, theirs = models_of(loaded, (sender, receiver), device)
    report = counted("requests")
    total = len(plans) * sum(
        len(s.ends) for name, some in parts.items() if name != "statistics" for s in some
    )
    found = calibrate(
        Bridge(loaded, sender=ours, receiver=theirs),
        samples,
        config,
        progress=lambda n: report(n, total, "at most"),
    )
    save_calibration(found, target)
    if lost := [s for s in chosen if s not in found.signals]:
        without = (
            "" if loaded.factors else " (the asset carries no factor for leverage; fit it again)"
        )
        say(
            f"left out: {', '.join(lost)}: no number for this pair at every of these tails{without}"
        )
    show(load_calibration(target, loaded), loaded, target, as_json)


@gate.command("show")
def gate_show(
    asset: Path,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration folder; default: ASSET.gate.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Thresholds, guarantee, coverage, signals and their cost, and what would expire a calibration."""
    from kvbridge.asset.folder import load_asset
    from kvbridge.cli.gate_show import show
    from kvbridge.gates.decide.calibration import load_calibration

    loaded, target = load_asset(asset), _calibration(asset, calibration)
    show(load_calibration(target, loaded), loaded, target, as_json)


@gate.command("time")
def gate_time(
    asset: Path,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration folder; default: ASSET.gate.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Texts to make the prompt of; the demo's by default.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Prompt length in receiver tokens.", min=64)] = 2048,
    repeats: Annotated[int, typer.Option(help="Turns; medians are shown.", min=1)] = 5,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Writes FLOPs per millisecond here, for predicted_ms.")
    ] = None,
    sender: Annotated[
        str | None, typer.Option(help="Sender, where the manifest's id is not where it lies.")
    ] = None,
    receiver: Annotated[str | None, typer.Option(help="Receiver, likewise.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = "cpu",
    as_json: Json = False,
) -> None:
    """Time prefill, handoff and signals on this device: the gate's share, and the speed that predicted_ms needs."""
    import json

    import torch

    from kvbridge.asset.folder import load_asset
    from kvbridge.cli.checks import check_out
    from kvbridge.cli.gate_show import show_timing
    from kvbridge.cli.run import models_of
    from kvbridge.eval.run.latency import longest_text
    from kvbridge.eval.tasks.items import demo_rows, read_raw
    from kvbridge.files import write_file
    from kvbridge.gates.decide.calibration import load_calibration
    from kvbridge.gates.decide.timing import measure
    from kvbridge.handoff.bridge import Bridge

    torch.set_num_threads(threads)
    if out is not None:
        check_out(out.parent)
    loaded = load_asset(asset)
    found = load_calibration(_calibration(asset, calibration), loaded)
    raws = demo_rows("test") if data is None else read_raw(data)
    texts = [raw.body["text"] for raw in raws if isinstance(raw.body.get("text"), str)]
    ours, theirs = models_of(loaded, (sender, receiver), device)
    timing = measure(
        Bridge(loaded, sender=ours, receiver=theirs),
        found.extras,
        longest_text(theirs, texts, tokens),
        plan=found.rungs[0].plan,
        signals=found.signals,
        tokens=tokens,
        repeats=repeats,
    )
    if out is not None:
        write_file(out, (json.dumps(timing.speed.to_json(), indent=1) + "\n").encode())
    show_timing(timing, as_json)


def _calibration(asset: Path, given: Path | None) -> Path:
    """The folder of a calibration: the one given, else the one beside the asset; raises UsageError where there is none."""
    from kvbridge.errors import UsageError

    where = given or CALIBRATION.beside(asset)
    if not where.is_dir():
        raise UsageError(
            f"no calibration stands at {where}: run `kvbridge gate calibrate {asset}` first"
        )
    return where


def samples_of(
    data: str | None,
    label: str,
    limit: int | None,
    known: Callable[[str], bool] = lambda document: False,
) -> list[Any]:
    """Texts with several prompts each, or questions with their answer; the demo's held-out texts where DATA is None.

    Rows of documents that are `known` (the translator was fitted on them: it errs less there than on new text) are left
    out and counted on stderr. Raises UsageError where no row is left.
    """
    from kvbridge.cli.output import say
    from kvbridge.errors import EvalError, UsageError
    from kvbridge.eval.tasks.items import demo_rows, prompt_and_answers, read_raw
    from kvbridge.gates.calibrate.passing import Sample

    rows = [*demo_rows("test"), *demo_rows("recall")] if data is None else list(read_raw(data))
    raws = [raw for raw in rows if not known(raw.document)]
    if rows and not raws:
        raise UsageError(
            "the translator was fitted on every document of these texts; give others with --data"
        )
    if len(raws) < len(rows):
        say(
            f"{len(rows) - len(raws)} of {len(rows)} rows left out: the translator was fitted on their documents"
        )
    Random(0).shuffle(raws)
    found = []
    for raw in raws:
        text = raw.body.get("text")
        if isinstance(text, str) and label != "lost_answer":
            rng = Random(raw.id)
            wanted = sorted(rng.randint(160, 900) for _ in range(3))
            body = text[: wanted[-1] + 200]
            ends = {body.rfind(" ", 0, n) for n in wanted}
            found.append(
                Sample(
                    raw.id,
                    raw.document,
                    body,
                    tuple(sorted(e for e in ends if 0 < e < len(body) - 1)),
                )
            )
        elif not isinstance(text, str):
            try:
                prompt, answers = prompt_and_answers(raw)
            except EvalError:
                continue
            found.append(
                Sample(raw.id, raw.document, prompt + answers[0], (len(prompt),), answer=True)
            )
    return found[:limit]
