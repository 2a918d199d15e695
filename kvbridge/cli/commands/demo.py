"""Options of `kvbridge demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbridge.cli.options import Json


def demo(
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the results. An interrupted run in the same folder continues."
        ),
    ] = Path("runs/demo"),
    items: Annotated[
        int,
        typer.Option(
            min=6,
            help="How many held-out texts the receiver continues; it answers a third as many "
            "questions.",
        ),
    ] = 165,
    latency: Annotated[
        bool,
        typer.Option(
            "--latency",
            help="Also measure, in milliseconds, from which prompt length on a handoff is faster "
            "than reading the prompt again.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Try kvbridge in about a minute, on the CPU and without a download.

    Two small models come with the package. The command fits a translator between them, hands over
    texts that the fit has not seen, and prints how well the receiver goes on from a translated
    cache, compared with reading the text itself, with not switching models, and with maps that
    never saw the sender.
    """
    from kvbridge.cli.demo import DemoCommand, run_demo

    run_demo(DemoCommand(out, items, latency, as_json))
