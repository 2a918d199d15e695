"""`kvbridge registry push` and `pull`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbridge.cli.options import Json
from kvbridge.cli.progress import transferred
from kvbridge.cli.registry_command import (
    Endpoint,
    Home,
    StoredAsset,
    Tag,
    emit,
    open_store,
)
from kvbridge.errors import NotInStore
from kvbridge.registry.hub.evaluation import evaluation


def push(
    asset: StoredAsset,
    repo: Annotated[
        str,
        typer.Argument(help="Repository on the Hub, org/name; it is made if it does not exist."),
    ],
    tag: Annotated[
        str | None,
        typer.Option(
            help="Tag to put on the upload; without it, a tag made of the translator's digest.",
            show_default=False,
        ),
    ] = None,
    private: Annotated[
        bool | None,
        typer.Option(
            "--private/--public",
            help="Whether only you may see a repository that is newly made.",
            show_default=False,
        ),
    ] = None,
    summary: Annotated[
        Path | None,
        typer.Option(
            help="A summary.json that `kvbridge eval run` wrote; its results are shown on the "
            "repository's page.",
            show_default=False,
        ),
    ] = None,
    endpoint: Endpoint = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Upload a translator to the Hub, with its controls and calibrations, in one tagged commit."""
    store = open_store(home)
    entry = store.select(asset)
    if entry.ref is None:
        raise NotInStore(f"{asset}: cannot be read")
    digest = entry.ref.digest
    section = None if summary is None else evaluation(summary, digest, store.manifest(digest))
    pushed = _hub(endpoint, as_json).push(
        store, digest, repo, tag=tag, private=private, section=section
    )
    body = {
        "repo": pushed.repo,
        "commit": pushed.commit,
        "tag": pushed.tag,
        "digest": digest,
    }
    done = f"pushed {digest[:12]} to {pushed.repo}@{pushed.tag} (commit {pushed.commit})"
    emit(as_json, body, done)


def pull(
    repo: Annotated[
        str,
        typer.Argument(
            help="Repository on the Hub, org/name; org/name@REVISION takes one commit or tag of it."
        ),
    ],
    tag: Tag = "main",
    digest: Annotated[
        str | None,
        typer.Option(
            help="Refuse anything but the translator with this digest.", show_default=False
        ),
    ] = None,
    endpoint: Endpoint = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Download a translator from the Hub and put it into the store.

    What belongs to it (controls, calibrations, a signature) comes with it, and everything is
    checked before the store has it.
    """
    store = open_store(home)
    name, _, revision = repo.partition("@")
    hub = _hub(endpoint, as_json)
    with transferred("pulling") as progress:
        ref = hub.pull(
            store,
            name,
            revision=revision or None,
            tag=tag,
            expect=digest,
            fetching=progress,
            progress=progress,
        )
    body = {
        "digest": ref.digest,
        "tag": ref.tag,
        "origin": ref.origin,
        "path": str(store.path(ref.digest)),
    }
    emit(as_json, body, f"pulled {ref.digest[:12]} from {ref.origin} as {ref.tag}")


def _hub(endpoint: str | None, as_json: bool) -> Any:
    """The Hub. Uploads show the client's own bars, which take no others; a log gets none."""
    from huggingface_hub.utils import disable_progress_bars

    from kvbridge.registry.hub import Hub

    if as_json or not sys.stderr.isatty():
        disable_progress_bars()
    return Hub(endpoint)
