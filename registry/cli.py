"""`kvbridge registry`: keep, find, share, verify and remove translators.

ASSET is `SENDER..RECEIVER[@TAG]` or the beginning of a digest. Exit codes: 0 done, 2 a usage error, 1 any other
refusal, with one line on stderr that says what was wrong and what to do. With --json, stdout is one JSON document.
"""

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

from kvbridge.errors import FileError, KVBridgeError, NotInStore, StoreError, UsageError
from kvbridge.files import read_json
from kvbridge.registry import display
from kvbridge.registry.admission import Policy, Progress
from kvbridge.registry.signing import sign as sign_statement
from kvbridge.registry.store import LocalStore, default_home

registry_app = typer.Typer(
    help="Keep, find, share, verify and remove translators.", no_args_is_help=True, rich_markup_mode=None
)
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, for machines.")]
Home = Annotated[Path | None, typer.Option("--home", help="The store's folder; KVBRIDGE_HOME by default.")]
Asset = Annotated[str, typer.Argument(metavar="ASSET", help="SENDER..RECEIVER[@TAG], or 6 or more digits of a digest.")]
Endpoint = Annotated[str | None, typer.Option(help="Address of the Hub; HF_ENDPOINT by default.", envvar="HF_ENDPOINT")]
F = TypeVar("F", bound=Callable[..., Any])


def command(name: str) -> Callable[[F], F]:
    """Registers a command whose expected errors become one line and an exit code."""

    def register(function: F) -> F:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> None:
            try:
                function(*args, **options)
            except KVBridgeError as error:
                typer.echo(f"kvbridge registry {name}: {display.clean(str(error))}", err=True)
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
        return LocalStore(home, Policy(**body, public_keys=keys))
    except (AttributeError, TypeError) as error:
        raise UsageError(
            f"{path}: expected require_signature, public_keys, max_weights_bytes or max_tensors: {error}"
        ) from error


@command("ls")
def ls(home: Home = None, as_json: Json = False) -> None:
    """List every translator and what is bound to it."""
    store = open_store(home)
    entries = store.entries()
    _show(
        as_json,
        {"home": str(store.home), "entries": [display.entry_json(e) for e in entries]},
        display.table(store.home, entries),
    )


@command("show")
def show(asset: Asset, home: Home = None, as_json: Json = False) -> None:
    """Show one asset: models, licences, scores, where it lies, the id that other routers use."""
    store = open_store(home)
    details = display.details(store, store.select(asset))
    _show(as_json, details, display.details_table(details))


@command("add")
def add(
    folder: Annotated[Path, typer.Argument(help="An asset's folder, as `kvbridge fit --out` writes it.")],
    tag: str = "main",
    signature: Annotated[Path | None, typer.Option(help="Folder that `registry sign` wrote.")] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Put a fitted asset, and the control set and calibration beside it, into the store. Those may be added alone, too."""
    store = open_store(home)
    with _progress(as_json, "adding") as progress:
        if display.is_bound(folder):
            ref = store.attach(folder, tag=tag, progress=progress)
        else:
            ref = store.publish(folder, tag=tag, signature=signature, progress=progress)
            for suffix in (".controls", ".gate"):
                beside = folder.with_name(folder.name + suffix)
                if beside.is_dir():
                    store.attach(beside)
    body = {"digest": ref.digest, "kind": ref.kind, "tag": ref.tag, "path": str(store.path(ref.digest))}
    _show(as_json, body, f"added {ref.kind} {ref.digest[:12]} as {ref.tag}")


@command("verify")
def verify(
    asset: Annotated[str | None, typer.Argument(metavar="[ASSET]", help="As in `show`; everything by default.")] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Read assets whole and check every digest and weight; what fails goes to the quarantine."""
    store = open_store(home)
    entries = store.entries() if asset is None else [store.select(asset)]
    results = []
    for digest, name in {e.ref.digest: display.name_of(e) for e in entries if e.ref is not None}.items():
        try:
            store.verify(digest)
            results.append({"digest": digest, "name": name, "problem": None})
        except (FileError, StoreError) as error:
            results.append({"digest": digest, "name": name, "problem": str(error)})
    results += [{"digest": None, "name": display.name_of(e), "problem": e.problem} for e in entries if e.ref is None]
    _show(as_json, {"verified": results}, display.verified(results))
    bad = [r for r in results if r["problem"] is not None]
    if bad:
        raise StoreError(f"{len(bad)} of {len(results)} failed: {bad[0]['problem']}")


@command("push")
def push(
    asset: Asset,
    repo: Annotated[str, typer.Argument(help="org/name on the Hub; made if it is not there.")],
    tag: Annotated[str | None, typer.Option(help="Tag for the commit; the asset's digest by default.")] = None,
    private: Annotated[bool | None, typer.Option("--private/--public")] = None,
    endpoint: Endpoint = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Upload a translator and what is bound to it in one commit, and tag that."""
    store = open_store(home)
    entry = store.select(asset)
    if entry.ref is None:
        raise NotInStore(f"{asset}: cannot be read")
    pushed = _hub(endpoint, as_json).push(store, entry.ref.digest, repo, tag=tag, private=private)
    body = {"repo": pushed.repo, "commit": pushed.commit, "tag": pushed.tag, "digest": entry.ref.digest}
    _show(as_json, body, f"pushed {entry.ref.digest[:12]} to {pushed.repo}@{pushed.tag} (commit {pushed.commit})")


@command("pull")
def pull(
    repo: Annotated[str, typer.Argument(help="org/name, or org/name@REVISION to pin a commit or tag.")],
    tag: str = "main",
    digest: Annotated[str | None, typer.Option(help="The digest that the asset must have.")] = None,
    endpoint: Endpoint = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Download a translator at one resolved commit, check it, and put it into the store."""
    store = open_store(home)
    name, _, revision = repo.partition("@")
    with _progress(as_json, "publishing") as progress:
        ref = _hub(endpoint, as_json).pull(
            store, name, revision=revision or None, tag=tag, expect=digest, progress=progress
        )
    body = {"digest": ref.digest, "tag": ref.tag, "origin": ref.origin, "path": str(store.path(ref.digest))}
    _show(as_json, body, f"pulled {ref.digest[:12]} from {ref.origin} as {ref.tag}")


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
        raise NotInStore(f"{asset}: it was removed or replaced meanwhile; see `kvbridge registry ls`")
    _show(
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
    _show(as_json, {"executed": not dry_run, **done.to_json()}, display.plan(done, dry_run))


@command("rebuild")
def rebuild(home: Home = None, as_json: Json = False) -> None:
    """Make the catalog anew from the manifests."""
    count = open_store(home).rebuild()
    _show(as_json, {"objects": count}, f"the catalog holds {count} object(s)")


@command("sign")
def sign(
    asset: Asset,
    key: Annotated[Path, typer.Option(help="PEM file of an elliptic curve private key.")],
    version: Annotated[int, typer.Option(help="Grows with every asset you publish for this pair.")],
    out: Annotated[Path, typer.Option(help="Folder to write the signature to; kept beside the asset, too.")],
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
    _show(
        as_json,
        {"digest": entry.ref.digest, "version": version, "path": str(out)},
        f"signed {entry.ref.digest[:12]} as version {version}",
    )


def _hub(endpoint: str | None, as_json: bool) -> Any:
    from huggingface_hub.utils import disable_progress_bars

    from kvbridge.registry.hub import Hub

    if as_json or not sys.stderr.isatty():
        disable_progress_bars()
    return Hub(endpoint)


@contextmanager
def _progress(as_json: bool, what: str) -> Iterator[Progress]:
    if as_json or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=Console(stderr=True)
    ) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show(as_json: bool, body: Any, text: Any) -> None:
    if as_json:
        typer.echo(json.dumps(body, ensure_ascii=False, sort_keys=True))
    else:
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(text, markup=False, highlight=False)
