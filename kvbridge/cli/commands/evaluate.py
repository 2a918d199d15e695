"""Options of `kvbridge eval run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbridge.cli.options import (
    AssetDType,
    AssetFolder,
    Data,
    Device,
    Json,
    ModelOptions,
    Processes,
    Receiver,
    ReceiverAdapter,
    Sender,
    SenderAdapter,
    names_in,
)

evaluation = typer.Typer(
    help="Measure on held-out texts whether a translator is worth using.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@evaluation.command("run")
def eval_run(
    asset: AssetFolder,
    data: Data = None,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the results: rows.jsonl (one row per item and way of answering), "
            "summary.json and report.html. An interrupted run in the same folder continues."
        ),
    ] = Path("runs/eval"),
    conditions: Annotated[
        str | None,
        typer.Option(
            help="Ways of answering to compare, comma-separated, such as "
            "native,sender,translated,token_only. Without it, all that apply to this pair.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Only these tasks, comma-separated: continuation, recall, multiple_choice, qa. "
            "Without it, all that the texts contain.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=2, help="Use at most N items of each task.", show_default=False),
    ] = None,
    controls: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the maps that the translator is compared with. Without it, "
            "ASSET.controls is read.",
            show_default=False,
        ),
    ] = None,
    gate: Annotated[
        str | None,
        typer.Option(
            help="Also measure handoffs that a gate decides on, one by one: always-accept, "
            "always-refuse, or the folder of a calibration (see `kvbridge gate calibrate`).",
            show_default=False,
        ),
    ] = None,
    sender: Sender = None,
    receiver: Receiver = None,
    dtype: AssetDType = None,
    sender_adapter: SenderAdapter = None,
    receiver_adapter: ReceiverAdapter = None,
    device: Device = "cpu",
    processes: Processes = 1,
    as_json: Json = False,
) -> None:
    """Measure a translator on texts that its fit has not seen.

    Every item is answered in several ways, called conditions. The most important: native (the
    receiver reads the prompt itself: the ceiling), sender (models are not switched), translated
    (the receiver continues from the translated cache), token_only (a map that reads the receiver's
    own tokens and no sender), wrong_document (the sender's cache of another text) and no_context
    (nothing of the prompt: the floor). Conditions with a number, such as translated_tail32,
    recompute so many last tokens of the prompt with the receiver.

    The summary says for each of them what share of the receiver's own quality is reached, what it
    costs, and whether the translator beats both the receiver and not switching at all.
    """
    from kvbridge.cli.evaluate import EvalCommand, run_eval

    run_eval(
        EvalCommand(
            asset,
            out,
            data=data,
            conditions=names_in(conditions),
            tasks=names_in(tasks),
            limit=limit,
            controls=controls,
            gate=gate,
            models=ModelOptions(
                (sender, receiver), (sender_adapter, receiver_adapter), dtype, device
            ),
            processes=processes,
            as_json=as_json,
        )
    )
