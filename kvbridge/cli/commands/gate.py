"""Options of `kvbridge gate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbridge.cli.options import (
    AssetDType,
    AssetFolder,
    CalibrationFolder,
    Data,
    Device,
    Json,
    ModelOptions,
    Receiver,
    ReceiverAdapter,
    Sender,
    SenderAdapter,
)

gate = typer.Typer(
    help="Decide request by request whether a translated cache may be used.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


def _share(value: float) -> float:
    """A risk or a confidence, checked before anything is imported for it: typer knows closed
    intervals only."""
    if not 0 < value < 1:
        raise typer.BadParameter(f"expected a number between 0 and 1, found {value:g}")
    return value


@gate.command("calibrate")
def gate_calibrate(
    asset: AssetFolder,
    data: Data = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write the calibration to; it must not exist yet. Without it, "
            "ASSET.gate is written.",
            show_default=False,
        ),
    ] = None,
    alpha: Annotated[
        float,
        typer.Option(
            callback=_share,
            help="Of the requests that get the verdict `use`, at most this share may be damaged.",
        ),
    ] = 0.02,
    lenient: Annotated[
        float,
        typer.Option(
            callback=_share,
            help="Of all requests that are accepted (`use` and `use_approximate` together), at "
            "most this share may be damaged. Nothing is promised of `use_approximate` alone.",
        ),
    ] = 0.1,
    delta: Annotated[
        float,
        typer.Option(
            callback=_share,
            help="Probability that the calibration texts mislead and a promise does not hold: "
            "each holds with confidence 1 − DELTA.",
        ),
    ] = 0.05,
    label: Annotated[
        str,
        typer.Option(
            help="What counts as damage: next_token (the likeliest next token changes), "
            "continuation (one of the next TAU tokens changes), lost_answer (a right answer turns "
            "wrong), loss_gap (the loss rises by more than TAU) or kl (the KL divergence of the "
            "next token exceeds TAU)."
        ),
    ] = "next_token",
    tau: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1e6,
            help="The limit that a label needs: nats for loss_gap and kl, tokens for continuation.",
            show_default=False,
        ),
    ] = None,
    tails: Annotated[
        str,
        typer.Option(
            help="How many of the prompt's last tokens the receiver recomputes. Several numbers, "
            "such as 17,49, are tried in this order until the gate accepts."
        ),
    ] = "17",
    signals: Annotated[
        str | None,
        typer.Option(
            help="What the gate looks at: names, comma-separated, or `all`. Without it, the "
            "signals that together cost less than 2 % of reading a prompt of 2,048 tokens.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use at most N texts.", show_default=False)
    ] = None,
    sender: Sender = None,
    receiver: Receiver = None,
    dtype: AssetDType = None,
    sender_adapter: SenderAdapter = None,
    receiver_adapter: ReceiverAdapter = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Calibrate a gate for a translator, from texts that its fit has not seen.

    A gate looks at one translated cache and says `use`, `use_approximate` (use it, and mark the
    answer as approximate) or `discard` (the receiver reads the prompt itself). It scores each cache
    by a few cheap signals. The calibration sets the score's limits such that, with confidence, no
    more than a chosen share of what is accepted is damaged; where no limit achieves that, it
    accepts nothing.
    """
    from kvbridge.cli.calibrate import CalibrateCommand, plans_in, run_calibrate, signals_in
    from kvbridge.gates.calibrate.config import GateConfig

    config = GateConfig(
        label=label,
        tau=tau,
        alpha=alpha,
        lenient_alpha=max(alpha, lenient),
        delta=delta,
        plans=plans_in(tails),
        signals=signals_in(signals),
    )
    models = ModelOptions((sender, receiver), (sender_adapter, receiver_adapter), dtype, device)
    run_calibrate(CalibrateCommand(asset, data, out, config, limit, models, as_json))


@gate.command("show")
def gate_show(
    asset: AssetFolder, calibration: CalibrationFolder = None, as_json: Json = False
) -> None:
    """Show what a calibration promises.

    That is: its limits, how many requests it accepts and how many of those were damaged, how well
    each signal tells damage and what it costs, and what makes the calibration expire.
    """
    from kvbridge.cli.calibrate import run_show

    run_show(asset, calibration, as_json)


@gate.command("time")
def gate_time(
    asset: AssetFolder,
    calibration: CalibrationFolder = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Texts to make the prompt of, as for `gate calibrate`. Without it, the demo's "
            "texts are used.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=64, help="Length of the prompt in tokens of the receiver.")
    ] = 2048,
    repeats: Annotated[int, typer.Option(min=1, help="Measure N times and show the medians.")] = 5,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="CPU threads to use.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Also write this device's speed (FLOPs per millisecond) to this JSON file. A gate "
            "that is given it predicts costs in milliseconds.",
            show_default=False,
        ),
    ] = None,
    sender: Sender = None,
    receiver: Receiver = None,
    dtype: AssetDType = None,
    sender_adapter: SenderAdapter = None,
    receiver_adapter: ReceiverAdapter = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Measure what the gate costs on this device.

    Reading the prompt with the receiver, the handoff, and each signal are timed in turn; the table
    gives milliseconds and shares of the first.
    """
    from kvbridge.cli.calibrate import TimeCommand, run_time

    models = ModelOptions((sender, receiver), (sender_adapter, receiver_adapter), dtype, device)
    run_time(TimeCommand(asset, calibration, data, tokens, repeats, threads, out, models, as_json))
