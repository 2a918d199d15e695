"""Makes the demo's texts and models anew: `python -m recipes.demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvbridge.cli.ending import run_to_the_end
from kvbridge.demo import MODELS
from kvbridge.errors import UsageError, unknown_names
from recipes.demo import cards, measure
from recipes.demo import train as training
from recipes.demo.build import build
from recipes.demo.export import ship

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Name = Literal["sender", "receiver", "tuned"]
Sources = Annotated[
    Path,
    typer.Option(help="Folder of the two Debian packages with the prose; they are fetched there."),
]
SOURCES = Path("runs/demo-sources")


@app.command("texts")
def texts_command(
    sources: Sources = SOURCES,
    tokenizer: Annotated[
        bool,
        typer.Option(
            "--tokenizer", help="Train a new tokenizer first; all models must then be trained anew."
        ),
    ] = False,
) -> None:
    """Cut the texts that the package ships out of the sources."""
    build(sources, tokenizer)


@app.command("train")
def train_command(
    model: Annotated[Name, typer.Option(help="Which model to train.")],
    out: Annotated[
        Path, typer.Option(help="Folder for checkpoint.pt and log.jsonl; a cut run there goes on.")
    ],
    sources: Sources = SOURCES,
    steps: Annotated[int, typer.Option(help="Length of the schedule in steps.")] = 1500,
    until: Annotated[
        int | None, typer.Option(help="Stop at this step of the schedule.", show_default=False)
    ] = None,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of one step.")] = 2048,
    rate: Annotated[float, typer.Option(help="Highest learning rate of the schedule.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Of the initial weights and the texts.")] = 0,
    keep_every: Annotated[
        int, typer.Option(help="Also keep the weights of every N-th step; 0 keeps none.")
    ] = 0,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Train a third faster; needs a C++ compiler.")
    ] = False,
) -> None:
    """Train one model on a single CPU thread, which takes less than an hour."""
    settings = training.Settings(
        model,
        steps,
        batch_tokens,
        rate,
        seed,
        keep_every=keep_every,
        compiled=compiled,
    )
    training.train(settings, sources, out, until)


@app.command("export")
def export_command(
    model: Annotated[Name, typer.Option(help="Which model the checkpoint is of.")],
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint.pt that `train` wrote.")],
    flags: Annotated[
        str, typer.Option(help="Further flags of the training command, for the card.")
    ] = "",
    note: Annotated[str, typer.Option(help="How the run went, for the card.")] = "not cut",
) -> None:
    """Put a checkpoint into the package, as a folder that transformers loads."""
    ship(model, checkpoint, flags, note)


@app.command("measure")
def measure_command(
    write_cards: Annotated[
        bool, typer.Option("--write-cards", help="Write the figures into the models' README.md.")
    ] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Measure only this model; may be repeated.", show_default=False),
    ] = None,
) -> None:
    """Print the figures of the model cards, measured from the shipped files."""
    if unknown := [name for name in model or () if name not in MODELS]:
        raise UsageError(unknown_names("models", unknown, MODELS))
    for name in model or MODELS:
        figures = measure.figures(name)
        shown = "  ".join(f"{key} {value:.4g}" for key, value in figures.items())
        print(f"demo:{name}  {shown}", flush=True)
        if write_cards:
            cards.write(name, figures)


if __name__ == "__main__":
    run_to_the_end(app, "python -m recipes.demo")
