"""Options of `kvbridge screen`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvbridge.cli.options import (
    MODEL,
    Data,
    Device,
    DType,
    Json,
    ModelOptions,
    Processes,
    SenderLayers,
    adapters_in,
)


def screen(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODELS...", help=f"Two or more different models, each one {MODEL}."
        ),
    ],
    data: Data = None,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the results: one run folder per pair, screening.json and "
            "report.html. An interrupted run in the same folder continues."
        ),
    ] = Path("runs/screen"),
    items: Annotated[
        int, typer.Option(min=2, help="Evaluate at most N items of each task and pair.")
    ] = 500,
    layers: SenderLayers = 8,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Fit on at most N tokens of each text.")
    ] = 256,
    predict_only: Annotated[
        bool,
        typer.Option(
            "--predict-only",
            help="Fit nothing: only print what a few texts already say of each pair, such as how "
            "similar the two models' caches are. This takes seconds.",
        ),
    ] = False,
    latency: Annotated[
        bool,
        typer.Option(
            help="Measure from which prompt length (in tokens) on a handoff is faster than reading "
            "the prompt again."
        ),
    ] = True,
    dtype: DType = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL=ADAPTER",
            help="Put a PEFT adapter, a folder or org/name on the Hub, into one of MODELS. May be "
            "given once for each of them.",
            show_default=False,
        ),
    ] = None,
    device: Device = "cpu",
    processes: Processes = 1,
    as_json: Json = False,
) -> None:
    """Find out which pairs of your models are worth a translator.

    Every ordered pair of MODELS is fitted and evaluated as `fit` and `eval run` do it. The table
    gives each pair a verdict: translate, translate behind the gate, receiver only (a map without
    any sender does as well), cascade instead (the switch gains nothing), or prefill (let the
    receiver read the prompt).
    """
    from kvbridge.cli.screen import ScreenCommand, run_screen
    from kvbridge.eval.screen.fleet import ScreenConfig
    from kvbridge.fitting.config import FitConfig

    config = ScreenConfig(
        fit=FitConfig(layers=layers, max_tokens=max_tokens),
        items=items,
        command=" ".join(["kvbridge", *sys.argv[1:]]),
        predict_only=predict_only,
        latency=latency,
        processes=processes,
    )
    asked = ModelOptions(tuple(models), adapters_in(adapter or (), models), dtype, device)
    run_screen(ScreenCommand(asked, data, out, config, as_json))
