"""What `kvbridge gate calibrate`, `show` and `time` do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from kvbridge.asset.folder import Asset, load_asset
from kvbridge.cli.checks import check_out
from kvbridge.cli.gate_show import show, show_timing
from kvbridge.cli.interrupt import leaving, left_whole
from kvbridge.cli.models import models_of
from kvbridge.cli.options import ModelOptions
from kvbridge.cli.output import say
from kvbridge.cli.progress import counted
from kvbridge.cli.samples import samples_of
from kvbridge.errors import UsageError
from kvbridge.eval.run.latency import longest_text
from kvbridge.eval.tasks.items import demo_rows, read_raw
from kvbridge.files import write_file
from kvbridge.fitting.data import check_data
from kvbridge.fitting.skipped import Skipped
from kvbridge.format import CALIBRATION
from kvbridge.gates.calibrate.config import GateConfig
from kvbridge.gates.calibrate.job import calibrate, parted
from kvbridge.gates.decide.calibration import load_calibration, save_calibration
from kvbridge.gates.decide.timing import measure
from kvbridge.gates.signals import DEFAULT_SIGNALS, SIGNALS
from kvbridge.handoff.bridge import Bridge
from kvbridge.handoff.plan import RepairPlan


@dataclass(frozen=True)
class CalibrateCommand:
    """What was asked for on the command line. `data` None: the demo's held-out texts; `out` None:
    ASSET.gate."""

    asset: Path
    data: str | None
    out: Path | None
    config: GateConfig
    limit: int | None
    models: ModelOptions
    as_json: bool


@dataclass(frozen=True)
class TimeCommand:
    """What was asked for on the command line, as in CalibrateCommand."""

    asset: Path
    calibration: Path | None
    data: str | None
    tokens: int
    repeats: int
    threads: int
    out: Path | None
    models: ModelOptions
    as_json: bool


def plans_in(tails: str) -> tuple[RepairPlan, ...]:
    """The repair plans that `17,49` stands for."""
    try:
        return tuple(RepairPlan(tail=int(tail)) for tail in tails.split(","))
    except ValueError as error:
        raise UsageError(f"expected --tails like 17,49, found {tails!r}") from error


def signals_in(names: str | None) -> tuple[str, ...]:
    """The signals that --signals stands for."""
    if names is None:
        return DEFAULT_SIGNALS
    return tuple(SIGNALS) if names == "all" else tuple(names.split(","))


def run_calibrate(asked: CalibrateCommand) -> None:
    """Calibrates, saves and shows."""
    out = asked.out or CALIBRATION.beside(asked.asset)
    with leaving(lambda: left_whole("a calibration", out)):
        _calibrate(asked, out)


def _calibrate(asked: CalibrateCommand, out: Path) -> None:
    check_out(out, new="calibrations")
    if asked.data is not None:
        check_data(asked.data)
    asset = load_asset(asked.asset)
    config = asked.config
    samples = samples_of(asked.data, config.label, asked.limit, asset.manifest.knows)
    parts = parted(samples, config)
    prompts = 0
    for part, some in parts.items():
        if part != "statistics":
            prompts += sum(len(sample.ends) for sample in some)
    sender, receiver = models_of(asset, asked.models)
    with counted("requests") as report:
        total = len(config.plans) * prompts
        calibration = calibrate(
            Bridge(asset, sender=sender, receiver=receiver),
            samples,
            config,
            progress=lambda done: report(done, total, "at most"),
        )
    save_calibration(calibration, out)
    _say_left_out(config.signals, calibration.signals, asset)
    show(load_calibration(out, asset), asset, out, asked.as_json)


def _say_left_out(asked: tuple[str, ...], used: tuple[str, ...], asset: Asset) -> None:
    missing = [name for name in asked if name not in used]
    if missing:
        why = "" if asset.factors else " (the asset carries no factor for leverage; fit it again)"
        say(f"left out: {', '.join(missing)}: no number for this pair at every of these tails{why}")


def run_show(folder: Path, calibration: Path | None, as_json: bool) -> None:
    """Shows a calibration."""
    asset, where = load_asset(folder), calibration_of(folder, calibration)
    show(load_calibration(where, asset), asset, where, as_json)


def run_time(asked: TimeCommand) -> None:
    """Times, and writes the speed of this device where that was asked for."""
    torch.set_num_threads(asked.threads)
    if asked.out is not None:
        check_out(asked.out.parent)
    asset = load_asset(asked.asset)
    calibration = load_calibration(calibration_of(asked.asset, asked.calibration), asset)
    raws = demo_rows("test") if asked.data is None else read_raw(asked.data, Skipped(say))
    texts = [raw.body["text"] for raw in raws if isinstance(raw.body.get("text"), str)]
    sender, receiver = models_of(asset, asked.models)
    timing = measure(
        Bridge(asset, sender=sender, receiver=receiver),
        calibration.extras,
        longest_text(receiver, texts, asked.tokens),
        plan=calibration.rungs[0].plan,
        signals=calibration.signals,
        tokens=asked.tokens,
        repeats=asked.repeats,
    )
    if asked.out is not None:
        write_file(asked.out, (json.dumps(timing.speed.to_json(), indent=1) + "\n").encode())
    show_timing(timing, asked.as_json)


def calibration_of(asset: Path, given: Path | None) -> Path:
    """The folder of a calibration: the one given, else the one beside the asset; raises UsageError
    where there is none."""
    where = given or CALIBRATION.beside(asset)
    if not where.is_dir():
        raise UsageError(
            f"no calibration stands at {where}: run `kvbridge gate calibrate {asset}` first"
        )
    return where
