"""`kvbridge registry`: keep, find, share, verify and remove translators.

Exit codes: 0 done, 2 a usage error, 1 any other refusal, with one line on stderr that says what was
wrong and what to do. With --json, stdout is one JSON document.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvbridge.cli import registry_display as display
from kvbridge.cli.commands.hub import pull, push
from kvbridge.cli.options import Json
from kvbridge.cli.progress import transferred
from kvbridge.cli.registry_command import (
    Home,
    StoredAsset,
    Tag,
    emit,
    open_store,
    refusing_in_one_line,
)
from kvbridge.errors import FileError, NotInStore, StoreError, UsageError
from kvbridge.format import CALIBRATION, CONTROL_SET
from kvbridge.registry.store.refs import Ref
from kvbridge.registry.store.signing import sign as sign_statement

registry_app = typer.Typer(
    help="Keep translators in a local store, find them, check them, and share them on the Hugging "
    "Face Hub.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


def ls(home: Home = None, as_json: Json = False) -> None:
    """List every translator in the store, and what belongs to it (controls, calibrations)."""
    store = open_store(home)
    entries = store.entries()
    body = {"home": str(store.home), "entries": [display.entry_json(e) for e in entries]}
    emit(as_json, body, display.table(store.home, entries))


def show(asset: StoredAsset, home: Home = None, as_json: Json = False) -> None:
    """Show what the store knows of one translator.

    That is: its two models and their licences, its scores, the folder it is in, and the id by which
    vLLM's semantic router knows it.
    """
    store = open_store(home)
    details = display.details(store, store.select(asset))
    emit(as_json, details, display.details_table(details))


def add(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of a translator, as `kvbridge fit --out` wrote it."),
    ],
    tag: Tag = "main",
    signature: Annotated[
        Path | None,
        typer.Option(help="Folder that `registry sign` wrote.", show_default=False),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Copy a translator into the store, after checking it.

    The controls and the calibration beside it (FOLDER.controls, FOLDER.gate) go with it. They can
    also be added later by themselves.
    """
    store = open_store(home)
    with transferred("adding") as progress:
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


def verify(
    asset: Annotated[
        str | None,
        typer.Argument(metavar="ASSET", help="Which one, as in `registry show`; all by default."),
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Read translators whole and check every file's SHA-256 digest and every weight.

    What fails is moved to the store's quarantine folder and is no longer used.
    """
    store = open_store(home)
    entries = store.entries() if asset is None else [store.select(asset)]
    names = {e.ref.digest: display.name_of(e) for e in entries if e.ref is not None}
    results = []
    for digest, name in names.items():
        problem = None
        try:
            store.verify(digest)
        except (FileError, StoreError) as error:
            problem = str(error)
        results.append({"digest": digest, "name": name, "problem": problem})
    for entry in entries:
        if entry.ref is None:
            name = display.name_of(entry)
            results.append({"digest": None, "name": name, "problem": entry.problem})
    emit(as_json, {"verified": results}, display.verified(results))
    bad = [r for r in results if r["problem"] is not None]
    if bad:
        raise StoreError(f"{len(bad)} of {len(results)} failed: {bad[0]['problem']}")


def rm(asset: StoredAsset, home: Home = None, as_json: Json = False) -> None:
    """Remove a translator's name; given a digest, all names of it.

    The files stay until `registry gc` deletes what no name stands for.
    """
    store = open_store(home)
    entry = store.select(asset)
    refs: list[Ref] = []
    if entry.ref is not None and ".." in asset:
        refs = [entry.ref]
    elif entry.ref is not None:
        refs = [e.ref for e in store.entries() if e.ref and e.ref.digest == entry.ref.digest]
    removed = [ref for ref in refs if store.remove(ref)]
    if not removed:
        raise NotInStore(
            f"{asset}: it was removed or replaced meanwhile; see `kvbridge registry ls`"
        )
    body = {"removed": [display.ref_json(ref) for ref in removed]}
    emit(as_json, body, f"removed {len(removed)} name(s); `kvbridge registry gc` frees the space")


def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be deleted.")
    ] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Delete what no name stands for, and what interrupted commands left behind."""
    store = open_store(home)
    plan = store.plan()
    done = plan if dry_run else store.collect(plan)
    emit(as_json, {"executed": not dry_run, **done.to_json()}, display.plan(done, dry_run))


def rebuild(home: Home = None, as_json: Json = False) -> None:
    """Make the store's catalog (the index that `registry ls` reads) anew from the files."""
    count = open_store(home).rebuild()
    emit(as_json, {"objects": count}, f"the catalog holds {count} object(s)")


def sign(
    asset: StoredAsset,
    key: Annotated[
        Path, typer.Option(help="Your elliptic curve private key, a file in PEM format.")
    ],
    version: Annotated[
        int,
        typer.Option(
            help="Number of this version; give a higher one to each translator that you publish "
            "for the same two models."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder to write the signature to; the store keeps a copy beside the translator."
        ),
    ],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Sign a translator's digest and a version number, so that others can check that it is yours.

    This needs the package model-signing: `pip install kvbridge[sign]`.
    """
    store = open_store(home)
    entry = store.select(asset)
    if entry.ref is None or entry.ref.kind != "translator":
        raise UsageError(f"{asset}: expected a translator")
    sign_statement(entry.ref.digest, version, key, out)
    store.attach(out)
    body = {"digest": entry.ref.digest, "version": version, "path": str(out)}
    emit(as_json, body, f"signed {entry.ref.digest[:12]} as version {version}")


COMMANDS: dict[str, Callable[..., None]] = {
    "add": add,
    "ls": ls,
    "show": show,
    "verify": verify,
    "push": push,
    "pull": pull,
    "sign": sign,
    "rm": rm,
    "gc": gc,
    "rebuild": rebuild,
}
"""In the order in which they are used."""

for name, function in COMMANDS.items():
    registry_app.command(name)(refusing_in_one_line(name, function))
