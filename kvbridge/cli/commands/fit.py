"""Options of `kvbridge fit`."""

from __future__ import annotations

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
    ReceiverAdapter,
    SenderAdapter,
    SenderLayers,
)


def fit(
    sender: Annotated[
        str,
        typer.Argument(metavar="SENDER", help=f"The model whose KV cache is translated: {MODEL}."),
    ],
    receiver: Annotated[
        str,
        typer.Argument(
            metavar="RECEIVER", help="The model that continues from the translated cache, likewise."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder to write the translator to; it must not exist yet. The maps that "
            "evaluations compare it with are written to OUT.controls."
        ),
    ],
    data: Data = None,
    family: Annotated[
        str,
        typer.Option(
            help="Which heads of the sender are read for a head of the receiver: full-head reads "
            "all of them, head-local only the one in the same place."
        ),
    ] = "full-head",
    layers: SenderLayers = 8,
    receiver_features: Annotated[
        str,
        typer.Option(
            help="What of the receiver itself is read as well: none, embeddings (of the prompt's "
            "tokens), or hidden:M (what comes out of the receiver's first M layers, which then "
            "run on the prompt and need no translation)."
        ),
    ] = "embeddings",
    selection: Annotated[
        str,
        typer.Option(
            help="How the sender's layers are chosen: nearest takes those at the same relative "
            "depth, top-k those that predict best alone, greedy those that predict best together."
        ),
    ] = "top-k",
    solver: Annotated[
        str,
        typer.Option(
            help="How the ridge regression is solved: cholesky, or eigh, which is slower and "
            "copes with columns that depend on one another."
        ),
    ] = "cholesky",
    candidates: Annotated[
        int | None,
        typer.Option(
            help="Choose only among the N sender layers nearest in relative depth, which takes "
            "less memory and time.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Use at most N tokens of each text.")
    ] = 1024,
    stride: Annotated[int, typer.Option(min=1, help="Learn from every N-th token only.")] = 1,
    batch_tokens: Annotated[
        int,
        typer.Option(min=1, help="Tokens of one forward pass, those for padding included."),
    ] = 8192,
    precision: Annotated[
        str,
        typer.Option(help="Multiply in float32 or float64; sums are float64 in either case."),
    ] = "float32",
    weights_dtype: Annotated[
        str,
        typer.Option(help="Store the translator as float32, bfloat16 or float16."),
    ] = "float32",
    memory_bytes: Annotated[
        int | None,
        typer.Option(
            help="Use at most N bytes of memory beside the two models; by default 70 % of what they "
            "leave free.",
            show_default=False,
        ),
    ] = None,
    one_at_a_time: Annotated[
        bool,
        typer.Option(
            "--one-at-a-time",
            help="Keep only one of the models on the device: the sender's caches are written to "
            "disk first.",
        ),
    ] = False,
    spill_bytes: Annotated[
        int | None,
        typer.Option(
            help="With --one-at-a-time: write at most N bytes to disk; by default 70 % of what is "
            "free.",
            show_default=False,
        ),
    ] = None,
    spill_folder: Annotated[
        str | None,
        typer.Option(
            help="With --one-at-a-time: write there; by default to the system's temporary folder.",
            show_default=False,
        ),
    ] = None,
    keep_near_duplicates: Annotated[
        bool,
        typer.Option(
            "--keep-near-duplicates",
            help="Do not look for texts that nearly repeat one another. Otherwise such texts are "
            "kept in one part, so that scores are of text that was not learned from.",
        ),
    ] = False,
    min_exact_share: Annotated[
        float,
        typer.Option(
            help="Refuse a pair where less than this share of the receiver's tokens ends where a "
            "token of the sender ends, as their tokenizers are too different."
        ),
    ] = 0.2,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Fit even from too few tokens to be trusted; the translator says so for good.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only print how much memory the two models and the fit need, and end; no weights "
            "are read.",
        ),
    ] = False,
    dtype: DType = None,
    sender_adapter: SenderAdapter = None,
    receiver_adapter: ReceiverAdapter = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Fit a translator from SENDER to RECEIVER and save it.

    A translator is one linear map per layer of the receiver, from the sender's keys and values to
    the receiver's. It is solved by ridge regression from the caches that both models make of the
    same texts; no model is trained. It works in this direction and for exactly these two models.

    The texts are split by document: from the first part the maps are solved, on the second their
    settings are chosen, and on the third the printed scores are measured.
    """
    from kvbridge.cli.fit import FitCommand, run_fit
    from kvbridge.duplicates import NEAR
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
        near_duplicates=None if keep_near_duplicates else NEAR,
        min_exact_share=min_exact_share,
        force=force,
    )
    models = ModelOptions((sender, receiver), (sender_adapter, receiver_adapter), dtype, device)
    run_fit(FitCommand(models, data, out, config, dry_run, as_json))
