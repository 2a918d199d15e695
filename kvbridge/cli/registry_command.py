"""What the commands of `kvbridge registry` share: options, exit codes, output for people or machines, progress."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from kvbridge.codec import read_json
from kvbridge.errors import KVBridgeError, UsageError
from kvbridge.registry.store import LocalStore, default_home
from kvbridge.registry.store.admission import AdmissionPolicy, ByteProgress
from kvbridge.registry.store.naming import clean

registry_app = typer.Typer(
    help="Keep, find, share, verify and remove translators.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, for machines.")]
Home = Annotated[
    Path | None, typer.Option("--home", help="The store's folder; KVBRIDGE_HOME by default.")
]
Asset = Annotated[
    str,
    typer.Argument(
        metavar="ASSET", help="SENDER..RECEIVER[@TAG], or 6 or more digits of a digest."
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(help="Address of the Hub; HF_ENDPOINT by default.", envvar="HF_ENDPOINT"),
]
F = TypeVar("F", bound=Callable[..., Any])


def command(name: str) -> Callable[[F], F]:
    """Registers a command whose expected errors become one line and an exit code."""

    def register(function: F) -> F:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> None:
            try:
                function(*args, **options)
            except KVBridgeError as error:
                typer.echo(f"kvbridge registry {name}: {clean(str(error))}", err=True)
                raise typer.Exit(2 if isinstance(error, UsageError) else 1) from error

        registry_app.command(name)(run)
        return function

    return register


def open_store(home: Path | None) -> LocalStore:
    """The store with the policy of its `policy.json`, if it has one."""
    home = home or default_home()
    path = home / "policy.json"
    if not path.exists():
        return LocalStore(home)
    body: Any = read_json(path)
    try:
        keys = tuple(home / key for key in body.pop("public_keys", ()))
        return LocalStore(home, AdmissionPolicy(**body, public_keys=keys))
    except (AttributeError, TypeError) as error:
        raise UsageError(
            f"{path}: expected require_signature, public_keys, max_weights_bytes or max_tensors: {error}"
        ) from error


@contextmanager
def progress_bar(as_json: bool, what: str) -> Iterator[ByteProgress]:
    """A bar on stderr where a person watches; the block calls what it is given with bytes done and in all."""
    if as_json or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn(what),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def emit(as_json: bool, body: Any, text: Any) -> None:
    """Prints `body` as JSON or `text` for people."""
    if as_json:
        typer.echo(json.dumps(body, ensure_ascii=False, sort_keys=True))
    else:
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(text, markup=False, highlight=False)
