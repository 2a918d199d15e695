"""Options that several commands have, with the words that explain them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL = "demo:sender, demo:receiver, demo:tuned, a local folder, or org/name@revision on the Hub"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Device = Annotated[
    str, typer.Option(help="Where the models run: cpu, cuda, or one GPU such as cuda:1.")
]
Processes = Annotated[
    int,
    typer.Option(min=1, help="Split the items among N processes with one CPU thread each."),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Texts to use: a .jsonl, .json, .csv, .tsv, .parquet, .arrow or .txt file, a folder "
        "of such files, or a dataset id on the Hub. Without it, the demo's texts are used.",
        show_default=False,
    ),
]
AssetFolder = Annotated[
    Path,
    typer.Argument(
        metavar="ASSET", help="Folder of a translator, as `kvbridge fit --out` wrote it."
    ),
]
CalibrationFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the calibration. Without it, ASSET.gate is read.", show_default=False
    ),
]
Sender = Annotated[
    str | None,
    typer.Option(
        help="Load the sender from here if it is no longer where it was when the translator was "
        "fitted.",
        show_default=False,
    ),
]
Receiver = Annotated[
    str | None,
    typer.Option(help="Load the receiver from here, likewise.", show_default=False),
]
SenderLayers = Annotated[
    int,
    typer.Option(
        min=1,
        help="How many of the sender's layers are read to translate one layer of the receiver.",
    ),
]


def names_in(text: str | None) -> tuple[str, ...] | None:
    """The names of a comma-separated option; None where it was not given."""
    if text is None:
        return None
    return tuple(name.strip() for name in text.split(",") if name.strip())
