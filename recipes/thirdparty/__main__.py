"""Two models that others published, from packages to a table: `python -m recipes.thirdparty`.

SmolLM2-135M-Instruct is the sender, Gemma-3-270M the receiver. Their tokenizers differ, 30 layers
with 3 KV heads of 64 stand against 18 layers with one of 256, and most layers of the receiver have
a sliding window. Every step resumes where a cut run stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbridge.cli.ending import run_to_the_end
from kvbridge.cli.options import DType, ModelOptions, ReceiverAdapter, SenderAdapter
from recipes.thirdparty.pair import prepare
from recipes.thirdparty.real import CONFIG, FULL, INPUTS, QUICK, QUICK_CONFIG, RealCommand, run

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.command("prepare")
def prepare_command(
    out: Annotated[Path, typer.Option(help="Folder to put models and texts into.")] = INPUTS,
) -> None:
    """Fetch both models and their texts by name and convert them."""
    prepare(out, lambda line: print(line, flush=True))


@app.command("run")
def run_command(
    out: Annotated[
        Path, typer.Option(help="Folder for the results; a cut run there goes on.")
    ] = INPUTS.parent,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use a tenth of the texts and simpler maps.")
    ] = False,
    latency: Annotated[
        bool,
        typer.Option(
            "--latency", help="Also measure from which prompt length on a handoff is faster."
        ),
    ] = False,
    dtype: DType = None,
    sender_adapter: SenderAdapter = None,
    receiver_adapter: ReceiverAdapter = None,
) -> None:
    """Prepare what is missing, fit a translator, evaluate it, and show the table."""
    models = ModelOptions(adapters=(sender_adapter, receiver_adapter), dtype=dtype)
    size, config = (QUICK, QUICK_CONFIG) if quick else (FULL, CONFIG)
    run(RealCommand(out, size, config, latency, models))


if __name__ == "__main__":
    run_to_the_end(app, "python -m recipes.thirdparty")
