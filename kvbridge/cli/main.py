"""The command line: every command composes what the packages offer, prints for people or, with --json, for machines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvbridge.cli.gate import gate
from kvbridge.cli.output import emit, say
from kvbridge.cli.registry import registry_app
from kvbridge.errors import KVBridgeError, UsageError

app = typer.Typer(
    name="kvbridge",
    help="Hand a conversation from one language model to another without reading it again.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
evaluation = typer.Typer(
    help="Measure a translator against both denominators, with controls.", no_args_is_help=True
)
app.add_typer(evaluation, name="eval")
app.add_typer(gate, name="gate")
app.add_typer(registry_app, name="registry")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")]
Processes = Annotated[
    int, typer.Option(min=1, help="Processes that share the items (CPU only), one thread each.")
]
Data = Annotated[
    str | None, typer.Option(help="A .jsonl, .parquet or .txt file, a folder, or a Hub dataset id.")
]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/demo"),
    items: Annotated[
        int, typer.Option(help="Continuation items; a third as many questions.", min=6)
    ] = 165,
    latency: Annotated[
        bool, typer.Option("--latency", help="Also time handoff against prefill.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Fit the demo pair, hand over its held-out texts and recall items, and print what a translation is worth."""
    from kvbridge.cli.run import run_demo

    run_demo(out, items, latency, as_json)


@app.command()
def fit(
    sender: str,
    receiver: str,
    out: Annotated[Path, typer.Option(help="Folder for the asset; must not exist.")],
    data: Data = None,
    family: Annotated[str, typer.Option(help="Map family.")] = "full-head",
    layers: Annotated[
        int, typer.Option(help="Sender layers read by each receiver layer.", min=1)
    ] = 8,
    receiver_features: Annotated[
        str, typer.Option(help="none, embeddings or hidden:m.")
    ] = "embeddings",
    selection: Annotated[str, typer.Option(help="top-k, nearest or greedy.")] = "top-k",
    solver: Annotated[str, typer.Option(help="cholesky or eigh.")] = "cholesky",
    candidates: Annotated[
        int | None, typer.Option(help="Consider only this many nearest sender layers.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens per document.", min=1)] = 1024,
    stride: Annotated[int, typer.Option(help="Every n-th token is a row.", min=1)] = 1,
    batch_tokens: Annotated[
        int, typer.Option(help="Padded tokens per forward pass.", min=1)
    ] = 8192,
    precision: Annotated[str, typer.Option(help="float32 or float64 products.")] = "float32",
    weights_dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16 on disk.")
    ] = "float32",
    memory_bytes: Annotated[int | None, typer.Option(help="Budget beside the models.")] = None,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="Spill the sender's rows to disk first.")
    ] = False,
    spill_bytes: Annotated[int | None, typer.Option(help="Disk budget of --one-at-a-time.")] = None,
    spill_folder: Annotated[str | None, typer.Option(help="Where to spill.")] = None,
    min_exact_share: Annotated[
        float, typer.Option(help="Least share of tokenizer end matches.")
    ] = 0.2,
    force: Annotated[
        bool, typer.Option("--force", help="Go on with too few rows; marks the asset.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the memory plan alone.")
    ] = False,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Fit a translator from SENDER's cache to RECEIVER's and save it as an asset."""
    from kvbridge.cli.run import run_fit
    from kvbridge.fitting.config import FitConfig

    config = FitConfig(
        family=family,
        layers=layers,
        receiver_features=receiver_features,
        selection=selection,
        solver=solver,
        candidates=candidates,
        max_tokens=max_tokens,
        stride=stride,
        batch_tokens=batch_tokens,
        precision=precision,
        weights_dtype=weights_dtype,
        memory_bytes=memory_bytes,
        one_at_a_time=one_at_a_time,
        spill_bytes=spill_bytes,
        spill_folder=spill_folder,
        min_exact_share=min_exact_share,
        force=force,
    )
    run_fit(sender, receiver, data, out, config, device, dry_run, as_json)


@app.command()
def inspect(asset: Path, as_json: Json = False) -> None:
    """Print what an asset says of itself, without loading its weights."""
    from kvbridge.asset.card import model_card
    from kvbridge.asset.manifest import Manifest
    from kvbridge.codec import read_json
    from kvbridge.format import TRANSLATOR

    path = asset / TRANSLATOR.description
    manifest = Manifest.from_json(read_json(path), str(path))
    if as_json:
        emit(manifest.body)
    else:
        Console(highlight=False).print(model_card(manifest), markup=False)


@app.command()
def verify(asset: Path, as_json: Json = False) -> None:
    """Check every digest, shape and weight of an asset."""
    from kvbridge.asset.folder import load_asset

    found = load_asset(asset)
    if as_json:
        emit({"digest": found.digest, "verified": True, "parameters": found.translator.parameters})
    else:
        Console(highlight=False).print(
            f"{asset}: sound, {found.translator.parameters:,} parameters, digest {found.digest}"
        )


@evaluation.command("run")
def eval_run(
    asset: Path,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Run folder; a cut run there continues.")] = Path(
        "runs/eval"
    ),
    conditions: Annotated[
        str | None,
        typer.Option(help="Comma-separated; default: all that apply, each at both tails."),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Comma-separated; default: all in the data.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Items per task.", min=2)] = None,
    controls: Annotated[
        Path | None, typer.Option(help="Control set; default: ASSET.controls.")
    ] = None,
    gate: Annotated[
        str | None,
        typer.Option(
            help="Also gated: always-accept, always-refuse or a calibration folder (for gated: ASSET.gate)."
        ),
    ] = None,
    sender: Annotated[
        str | None, typer.Option(help="Sender, where the manifest's id is not where it lies.")
    ] = None,
    receiver: Annotated[str | None, typer.Option(help="Receiver, likewise.")] = None,
    device: Device = "cpu",
    processes: Processes = 1,
    as_json: Json = False,
) -> None:
    """Evaluate an asset on held-out items: one JSONL row per item and condition, then summary and report."""
    from kvbridge.cli.run import run_eval

    def split(text: str | None) -> tuple[str, ...] | None:
        return None if text is None else tuple(x.strip() for x in text.split(",") if x.strip())

    run_eval(
        asset,
        data,
        out,
        split(conditions),
        split(tasks),
        limit,
        controls,
        gate,
        (sender, receiver),
        device,
        processes,
        as_json,
    )


@app.command()
def screen(
    models: Annotated[
        list[str], typer.Argument(help="Two or more: demo:…, folders or org/name[@revision].")
    ],
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Run folder; a cut run there continues.")] = Path(
        "runs/screen"
    ),
    items: Annotated[int, typer.Option(help="Items per task and pair.", min=2)] = 500,
    layers: Annotated[
        int, typer.Option(help="Sender layers read by each receiver layer.", min=1)
    ] = 8,
    max_tokens: Annotated[int, typer.Option(help="Tokens per document of the fits.", min=1)] = 256,
    predict_only: Annotated[
        bool, typer.Option("--predict-only", help="Only what can be said before fitting.")
    ] = False,
    latency: Annotated[bool, typer.Option(help="Measure the break-even prompt length.")] = True,
    device: Device = "cpu",
    processes: Processes = 1,
    as_json: Json = False,
) -> None:
    """Predict, fit and measure every ordered pair of MODELS: which are worth a translator?"""
    from kvbridge.cli.run import run_screen
    from kvbridge.fitting.config import FitConfig

    run_screen(
        models,
        data,
        out,
        items,
        FitConfig(layers=layers, max_tokens=max_tokens),
        predict_only,
        latency,
        device,
        processes,
        as_json,
    )


def main() -> None:
    """Entry point: exits 0 on success, 2 on a usage error, 1 on any other refusal, with one line that says why."""
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        code = 130
    except typer.TyperException as error:
        say(_argument_error(error))
        code = 2
    except UsageError as error:
        say(f"kvbridge: {error}")
        code = 2
    except (KVBridgeError, OSError) as error:
        say(f"kvbridge: {error}")
        code = 1
    sys.exit(code)


def _argument_error(error: typer.TyperException) -> str:
    """What the argument parser found wrong, in one line; the help alone where a command was given nothing."""
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    context = getattr(error, "ctx", None)
    if "Usage:" in text or context is None:
        return text
    return f"kvbridge: {' '.join(text.split()).rstrip('.')}; see `{context.command_path} --help`"


if __name__ == "__main__":
    main()
