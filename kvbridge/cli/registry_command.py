"""What the commands of `kvbridge registry` share: options, exit codes, the store, output."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvbridge.codec import read_json
from kvbridge.errors import KVBridgeError, UsageError
from kvbridge.registry.store import LocalStore, default_home
from kvbridge.registry.store.admission import AdmissionPolicy
from kvbridge.registry.store.naming import clean

Home = Annotated[
    Path | None,
    typer.Option(
        "--home",
        help="Folder of the store. By default, what the environment variable KVBRIDGE_HOME names, "
        "or else the folder kvbridge beside the Hub's cache.",
        show_default=False,
    ),
]
StoredAsset = Annotated[
    str,
    typer.Argument(
        metavar="ASSET",
        help="Which one: SENDER..RECEIVER, SENDER..RECEIVER@TAG, or the first 6 or more digits of "
        "its digest, as `registry ls` shows them.",
    ),
]
Tag = Annotated[
    str,
    typer.Option(help="Name of this version among others of the same two models."),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        help="Address of the Hub; HF_ENDPOINT, or else huggingface.co, by default.",
        envvar="HF_ENDPOINT",
        show_default=False,
    ),
]


def refusing_in_one_line(name: str, command: Callable[..., None]) -> Callable[..., None]:
    """A command whose expected errors become one line on stderr and an exit code."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KVBridgeError as error:
            typer.echo(f"kvbridge registry {name}: {clean(str(error))}", err=True)
            raise typer.Exit(2 if isinstance(error, UsageError) else 1) from error

    return run


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
            f"{path}: expected require_signature, public_keys, max_weights_bytes or max_tensors: "
            f"{error}"
        ) from error


def emit(as_json: bool, body: Any, text: Any) -> None:
    """Prints `body` as JSON or `text` for people."""
    if as_json:
        typer.echo(json.dumps(body, ensure_ascii=False, sort_keys=True))
    else:
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(text, markup=False, highlight=False)
