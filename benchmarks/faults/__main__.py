"""Attacks on the asset store that take too long for the tests: `python -m benchmarks.faults`.

docs/registry-faults.md records what they found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.command("campaign")
def campaign_command(
    kills: Annotated[int, typer.Option(help="Stop when so many processes were killed.")] = 3000,
    seed: Annotated[int, typer.Option(help="Of every draw.")] = 0,
    folder: Annotated[
        Path | None,
        typer.Option(help="Work there, such as in /dev/shm; by default in the temporary folder."),
    ] = None,
) -> None:
    """Kill processes at random points of a publish, a pull and a collection, and check the store.

    It stops at the first loss and keeps the folder then.
    """
    from benchmarks.faults.campaign import campaign

    print(f"seed {seed}: {campaign(kills, seed, folder)}")


@app.command("fuzz", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def fuzz_command(
    context: typer.Context,
    corpus: Annotated[
        Path, typer.Argument(help="Folder of inputs; a starting corpus is written to it.")
    ],
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Mutate bytes alone, which is ten times as fast, instead of JSON values.",
        ),
    ] = False,
) -> None:
    """Feed mutated files to everything that reads an asset before its digest is known.

    Further options are libFuzzer's, such as -runs=10000000 -rss_limit_mb=512. This needs the
    package atheris, which `make test` installs.
    """
    # Not before: atheris instruments modules while they are imported.
    from benchmarks.faults.fuzz import fuzz

    fuzz(corpus, plain, context.args)


if __name__ == "__main__":
    app()
