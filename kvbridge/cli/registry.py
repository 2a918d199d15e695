"""`kvbridge registry`: keep, find, share, verify and remove translators.

ASSET is `SENDER..RECEIVER[@TAG]` or the beginning of a digest. Exit codes: 0 done, 2 a usage error, 1 any other
refusal, with one line on stderr that says what was wrong and what to do. With --json, stdout is one JSON document.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbridge.cli import registry_display as display
from kvbridge.cli.registry_command import (
    Asset,
    Home,
    Json,
    command,
    emit,
    open_store,
    progress_bar,
    registry_app,
)
from kvbridge.cli.registry_hub import pull, push
from kvbridge.errors import FileError, NotInStore, StoreError, UsageError
from kvbridge.format import CALIBRATION, CONTROL_SET
from kvbridge.registry.store.signing import sign as sign_statement

__all__ = ["pull", "push", "registry_app"]


@command("ls")
def ls(home: Home = None, as_json: Json = False) -> None:
    """List every translator and what is bound to it."""
    store = open_store(home)
    entries = store.entries()
    emit(
        as_json,
        {"home": str(store.home), "entries": [display.entry_json(e) for e in entries]},
        display.table(store.home, entries),
    )


@command("show")
def show(asset: Asset, home: Home = None, as_json: Json = False) -> None:
    """Show one asset: models, licences, scores, where it lies, the id that other routers use."""
    store = open_store(home)
    details = display.details(store, store.select(asset))
    emit(as_json, details, display.details_table(details))


@command("add")
def add(
    folder: Annotated[
        Path, typer.Argument(help="An asset's folder, as `kvbridge fit --out` writes it.")
    ],
    tag: str = "main",
    signature: Annotated[
        Path | None, typer.Option(help="Folder that `registry sign` wrote.")
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Put a fitted asset, and the control set and calibration beside it, into the store. Those may be added alone, too."""
    store = open_store(home)
    with progress_bar(as_json, "adding") as progress:
        if display.is_bound(folder):
            ref = store.attach(folder, tag=tag, progress=progress)
        else:
            ref = store.publish(folder, tag=tag, signature=signature, progress=progress)
            for attachment in (CONTROL_SET, CALIBRATION):
                beside = attachment.beside(folder)
                if beside.is_dir():
                    store.attach(beside)
    body = {
        "digest": ref.digest,
        "kind": ref.kind,
        "tag": ref.tag,
        "path": str(store.path(ref.digest)),
    }
    emit(as_json, body, f"added {ref.kind} {ref.digest[:12]} as {ref.tag}")


@command("verify")
def verify(
    asset: Annotated[
        str | None, typer.Argument(metavar="[ASSET]", help="As in `show`; everything by default.")
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Read assets whole and check every digest and weight; what fails goes to the quarantine."""
    store = open_store(home)
    entries = store.entries() if asset is None else [store.select(asset)]
    results = []
    for digest, name in {
        e.ref.digest: display.name_of(e) for e in entries if e.ref is not None
    }.items():
        try:
            store.verify(digest)
            results.append({"digest": digest, "name": name, "problem": None})
        except (FileError, StoreError) as error:
            results.append({"digest": digest, "name": name, "problem": str(error)})
    results += [
        {"digest": None, "name": display.name_of(e), "problem": e.problem}
        for e in entries
        if e.ref is None
    ]
    emit(as_json, {"verified": results}, display.verified(results))
    bad = [r for r in results if r["problem"] is not None]
    if bad:
        raise StoreError(f"{len(bad)} of {len(results)} failed: {bad[0]['problem']}")


@command("rm")
def rm(asset: Asset, home: Home = None, as_json: Json = False) -> None:
    """Remove a name, or every name of a digest; `gc` deletes what no name stands for."""
    store = open_store(home)
    entry = store.select(asset)
    refs = [
        e.ref
        for e in store.entries()
        if e.ref is not None and entry.ref is not None and e.ref.digest == entry.ref.digest
    ]
    refs = [entry.ref] if entry.ref is not None and ".." in asset else refs
    removed = [ref for ref in refs if store.remove(ref)]
    if not removed:
        raise NotInStore(
            f"{asset}: it was removed or replaced meanwhile; see `kvbridge registry ls`"
        )
    emit(
        as_json,
        {"removed": [display.ref_json(r) for r in removed]},
        f"removed {len(removed)} name(s); `kvbridge registry gc` frees the space",
    )


@command("gc")
def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan only.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Delete objects without a name and what killed writers left behind: plan first, then execute."""
    store = open_store(home)
    plan = store.plan()
    done = plan if dry_run else store.collect(plan)
    emit(as_json, {"executed": not dry_run, **done.to_json()}, display.plan(done, dry_run))


@command("rebuild")
def rebuild(home: Home = None, as_json: Json = False) -> None:
    """Make the catalog anew from the manifests."""
    count = open_store(home).rebuild()
    emit(as_json, {"objects": count}, f"the catalog holds {count} object(s)")


@command("sign")
def sign(
    asset: Asset,
    key: Annotated[Path, typer.Option(help="PEM file of an elliptic curve private key.")],
    version: Annotated[int, typer.Option(help="Grows with every asset you publish for this pair.")],
    out: Annotated[
        Path, typer.Option(help="Folder to write the signature to; kept beside the asset, too.")
    ],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Sign an asset's digest and a version number (needs the package model-signing)."""
    store = open_store(home)
    entry = store.select(asset)
    if entry.ref is None or entry.ref.kind != "translator":
        raise UsageError(f"{asset}: expected a translator")
    sign_statement(entry.ref.digest, version, key, out)
    store.attach(out)
    emit(
        as_json,
        {"digest": entry.ref.digest, "version": version, "path": str(out)},
        f"signed {entry.ref.digest[:12]} as version {version}",
    )
