"""Options that several commands have, with the words that explain them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvbridge.errors import UsageError

MODEL = "demo:sender, demo:receiver, demo:tuned, a local folder, or org/name@revision on the Hub"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Device = Annotated[
    str, typer.Option(help="Where the models run: cpu, cuda, or one GPU such as cuda:1.")
]
DTypeName = Literal["float32", "bfloat16", "float16", "auto"]
DType = Annotated[
    DTypeName | None,
    typer.Option(
        help="Load the models in this dtype; auto takes each as its checkpoint is stored. Without "
        "it, float32 on the CPU, and as stored elsewhere. A translator belongs to the dtype that "
        "its models had.",
        show_default=False,
    ),
]
AssetDType = Annotated[
    DTypeName | None,
    typer.Option(
        help="Load the models in this dtype; auto takes each as its checkpoint is stored. Without "
        "it, the dtype that the translator was fitted with; any other is refused.",
        show_default=False,
    ),
]
SenderAdapter = Annotated[
    str | None,
    typer.Option(
        metavar="ADAPTER",
        help="Put this PEFT adapter, a folder or org/name on the Hub, into the sender.",
        show_default=False,
    ),
]
ReceiverAdapter = Annotated[
    str | None,
    typer.Option(
        metavar="ADAPTER", help="Put this PEFT adapter into the receiver.", show_default=False
    ),
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


@dataclass(frozen=True)
class ModelOptions:
    """The models of a command and how they are loaded.

    `names`: None where an asset's manifest says it. `adapters`: one for each name, None for none.
    `dtype`: None for the command's default, `auto` for each checkpoint's own.
    """

    names: tuple[str | None, ...] = (None, None)
    adapters: tuple[str | None, ...] = (None, None)
    dtype: str | None = None
    device: str = "cpu"


def adapters_in(given: Sequence[str], models: Sequence[str]) -> tuple[str | None, ...]:
    """The adapter of each of `models`, out of options such as `MODEL=ADAPTER`. Raises UsageError
    for another form, an unknown model, and a model that is named twice."""
    adapters: dict[str, str] = {}
    for option in given:
        # From the right, for a model's folder may be called a=b.
        name, _, adapter = option.rpartition("=")
        if name not in models or not adapter:
            raise UsageError(
                f"expected --adapter MODEL=ADAPTER with one of {', '.join(models)} as MODEL, "
                f"found {option!r}"
            )
        if name in adapters:
            raise UsageError(f"expected one adapter for each model, found two for {name}")
        adapters[name] = adapter
    return tuple(adapters.get(name) for name in models)


def names_in(text: str | None) -> tuple[str, ...] | None:
    """The names of a comma-separated option; None where it was not given."""
    if text is None:
        return None
    return tuple(name.strip() for name in text.split(",") if name.strip())
