"""`kvbridge registry push` and `pull`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbridge.cli.registry_command import (
    Asset,
    Endpoint,
    Home,
    Json,
    command,
    emit,
    open_store,
    progress_bar,
)
from kvbridge.errors import NotInStore
from kvbridge.registry.hub.evaluation import evaluation


@command("push")
def push(
    asset: Asset,
    repo: Annotated[str, typer.Argument(help="org/name on the Hub; made if it is not there.")],
    tag: Annotated[
        str | None, typer.Option(help="Tag for the commit; the asset's digest by default.")
    ] = None,
    private: Annotated[bool | None, typer.Option("--private/--public")] = None,
    summary: Annotated[
        Path | None,
        typer.Option(help="summary.json of `kvbridge eval run`, for the repository's card."),
    ] = None,
    endpoint: Endpoint = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Upload a translator and what is bound to it in one commit, and tag that."""
    store = open_store(home)
    entry = store.select(asset)
    if entry.ref is None:
        raise NotInStore(f"{asset}: cannot be read")
    section = (
        None
        if summary is None
        else evaluation(summary, entry.ref.digest, store.manifest(entry.ref.digest))
    )
    hub = _hub(endpoint, as_json)
    pushed = hub.push(store, entry.ref.digest, repo, tag=tag, private=private, section=section)
    body = {
        "repo": pushed.repo,
        "commit": pushed.commit,
        "tag": pushed.tag,
        "digest": entry.ref.digest,
    }
    emit(
        as_json,
        body,
        f"pushed {entry.ref.digest[:12]} to {pushed.repo}@{pushed.tag} (commit {pushed.commit})",
    )


@command("pull")
def pull(
    repo: Annotated[
        str, typer.Argument(help="org/name, or org/name@REVISION to pin a commit or tag.")
    ],
    tag: str = "main",
    digest: Annotated[str | None, typer.Option(help="The digest that the asset must have.")] = None,
    endpoint: Endpoint = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Download a translator at one resolved commit, check it, and put it into the store."""
    store = open_store(home)
    name, _, revision = repo.partition("@")
    with progress_bar(as_json, "publishing") as progress:
        ref = _hub(endpoint, as_json).pull(
            store, name, revision=revision or None, tag=tag, expect=digest, progress=progress
        )
    body = {
        "digest": ref.digest,
        "tag": ref.tag,
        "origin": ref.origin,
        "path": str(store.path(ref.digest)),
    }
    emit(as_json, body, f"pulled {ref.digest[:12]} from {ref.origin} as {ref.tag}")


def _hub(endpoint: str | None, as_json: bool) -> Any:
    from huggingface_hub.utils import disable_progress_bars

    from kvbridge.registry.hub import Hub

    if as_json or not sys.stderr.isatty():
        disable_progress_bars()
    return Hub(endpoint)
