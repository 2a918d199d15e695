"""Measures what the gate is worth on a pair of models: `python -m benchmarks.gates`.

The three commands follow one another. Only `collect` runs models, which takes hours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.gates.headline import headline
from benchmarks.gates.page import into as put_into
from benchmarks.gates.pool import CollectCommand, run
from benchmarks.gates.study import study
from benchmarks.gates.tables import tables
from kvbridge.cli.ending import run_to_the_end
from kvbridge.cli.options import Receiver, Sender
from kvbridge.codec import parse_json
from kvbridge.errors import UsageError
from kvbridge.files import write_file

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.command("collect")
def collect_command(
    out: Annotated[
        Path, typer.Option(help="Folder for the records; a cut run there goes on.")
    ] = Path("runs/gate"),
    asset: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a translator. Without it, the demo pair's is fitted into OUT/asset.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Texts for the translator's pair: the requests come from their test split, what "
            "the signals are scaled by from their validation split.",
            show_default=False,
        ),
    ] = None,
    sender: Sender = None,
    receiver: Receiver = None,
    ends: Annotated[
        int | None,
        typer.Option(
            help="Prompts to make of each text; by default 5 of the demo's and 2 of others.",
            show_default=False,
        ),
    ] = None,
    wrong: Annotated[
        int, typer.Option(help="Texts that are also tried with caches that are not theirs.")
    ] = 1300,
    limit: Annotated[
        int | None, typer.Option(help="Use at most N texts.", show_default=False)
    ] = None,
) -> None:
    """Hand over many requests and record every signal of the gate and what became of each."""
    run(CollectCommand(out, asset, data, sender, receiver, ends, wrong, limit))


@app.command("study")
def study_command(
    folder: Annotated[Path, typer.Argument(help="Folder that `collect` wrote.")],
) -> None:
    """Compute everything that the tables show from the records, into FOLDER/study.json."""
    body = study(folder)
    (folder / "study.json").write_text(json.dumps(body, indent=1) + "\n", "utf-8")


@app.command("tables")
def tables_command(
    results: Annotated[
        Path, typer.Argument(metavar="STUDY", help="The study.json that `study` wrote.")
    ],
    into: Annotated[
        Path | None,
        typer.Option(help="A Markdown page to put the tables into.", show_default=False),
    ] = None,
    section: Annotated[
        str | None,
        typer.Option(
            help="Which blocks of that page to replace: those between `<!-- SECTION: headline -->` "
            "or `<!-- SECTION: tables -->` and `<!-- end -->`.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the study as Markdown, or put it into a page."""
    body: Any = parse_json(results.read_bytes(), str(results))
    parts = {"headline": headline(body), "tables": tables(body)}
    if into is None:
        print(parts["headline"] + "\n" + parts["tables"])
        return
    if section is None:
        raise UsageError("expected --section with --into")
    page = put_into(into.read_text("utf-8"), section, parts)
    write_file(into, page.encode())


if __name__ == "__main__":
    run_to_the_end(app, "python -m benchmarks.gates")
