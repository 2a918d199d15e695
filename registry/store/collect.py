"""Collection: a plan of what no name stands for, then its execution, which looks at the names again
before it deletes.

Safe at any moment, next to any writer, and killed anywhere: an object in the trash is brought back
by whoever needs it.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvbridge.errors import StoreError
from kvbridge.files import sync_folder
from kvbridge.registry.store.disk import Disk, tree_bytes
from kvbridge.registry.store.records import DIGEST
from kvbridge.registry.store.refs import Ref, Refs


@dataclass(frozen=True)
class Plan:
    """What a collection deletes: objects without a name, work of writers that are gone, trash, and
    names of attachments whose translator has none. `damaged` names reference files that cannot be
    read: while there are any, no object is deleted.
    """

    objects: tuple[str, ...]
    stages: tuple[str, ...]
    trash: tuple[str, ...]
    attachments: tuple[str, ...]
    damaged: tuple[str, ...]
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        body = asdict(self)
        return {n: list(v) if isinstance(v, tuple) else v for n, v in body.items()}


def make_plan(disk: Disk, refs: Refs) -> Plan:
    """Reads the folders; changes nothing."""
    if not disk.objects.is_dir():
        return Plan((), (), (), (), (), 0)
    stages = [path.name for path in disk.abandoned()]
    names, damaged = _names(disk, refs, frozenset(stages))
    live = live_digests(names)
    # A name that cannot be read may stand for any object: then none counts as unnamed.
    stored = [] if damaged else sorted(entry.name for entry in disk.objects.iterdir())
    orphans = [digest for digest in stored if digest not in live]
    trash = sorted(entry.name for entry in disk.trash.iterdir())
    folders = [disk.objects / digest for digest in orphans]
    folders += [disk.tmp / stage for stage in stages]
    folders += [disk.trash / entry for entry in trash]
    return Plan(
        objects=tuple(orphans),
        stages=tuple(stages),
        trash=tuple(trash),
        attachments=tuple(sorted(stale_keys(names))),
        damaged=tuple(sorted(damaged)),
        bytes=sum(tree_bytes(folder) for folder in folders),
    )


def live_digests(names: list[Ref]) -> frozenset[str]:
    """Digests that a name keeps: translators that are named, and attachments that are named and
    whose translator is."""
    translators = {ref.digest for ref in names if ref.kind == "translator"}
    attachments = [ref for ref in names if ref.kind != "translator"]
    return frozenset(translators | {a.digest for a in attachments if a.scope[0] in translators})


def stale_keys(names: list[Ref]) -> frozenset[str]:
    """Keys of the names of attachments whose translator has none."""
    live = live_digests(names)
    attachments = [ref for ref in names if ref.kind != "translator"]
    return frozenset(ref.key for ref in attachments if ref.digest not in live)


def execute(disk: Disk, refs: Refs, plan: Plan) -> Plan:
    """Carries a plan out, sparing what was named since; returns what was deleted.

    An object goes to the trash only if nothing names it now, and for good only if nothing names it
    then: a name may come in between. Whoever reads it meanwhile brings it back.
    """
    stages = tuple(name for name in plan.stages if disk.clear(name))
    for aside in refs.asides():
        refs.end(aside)
    names, damaged = _names(disk, refs, frozenset())
    _refuse(damaged, refs)
    attachments = _drop_attachments(disk, refs, sorted(stale_keys(names) & set(plan.attachments)))
    for digest in sorted(set(plan.objects) - live_digests(names)):
        disk.discard(digest)
    sync_folder(disk.trash)
    sync_folder(disk.objects)
    before = list(disk.trash.iterdir())
    # Names are read again only now that the objects have left their place: a writer that named one
    # before the move is seen here, and one that names it later finds it gone and restores it.
    names, damaged = _names(disk, refs, frozenset())
    if damaged:
        for entry in before:
            _bring_back(disk, entry)
        _refuse(damaged, refs)
    live, deleted, size = live_digests(names), [], 0
    for entry in before:
        digest = entry.name.partition(".")[0]
        if digest in live and disk.restore(digest) and not entry.exists():
            continue
        size += tree_bytes(entry)
        if DIGEST.fullmatch(digest) and digest not in live:
            deleted.append(digest)
        disk.bury(entry)
    return Plan(tuple(sorted(set(deleted))), stages, plan.trash, attachments, (), size)


def _drop_attachments(disk: Disk, refs: Refs, keys: list[str]) -> tuple[str, ...]:
    """Removes names of attachments whose translator has none, and tells which: taken aside, looked
    at again, put back where the translator has been named meanwhile."""
    taken = {key: aside for key in keys if (aside := refs.take(key, "stale")) is not None}
    if not taken:
        return ()
    names, _ = _names(disk, refs, frozenset())
    translators = {ref.digest for ref in names if ref.kind == "translator"}
    gone = []
    for key, aside in taken.items():
        if refs.end(aside, wanted=lambda ref: ref.scope[0] in translators):
            gone.append(key)
    sync_folder(refs.folder)
    return tuple(gone)


def _refuse(damaged: list[str], refs: Refs) -> None:
    if damaged:
        raise StoreError(
            f"collecting stopped, nothing was lost: {', '.join(damaged[:3])} in {refs.folder} "
            "cannot be read; publish that asset again, or delete the file"
        )


def _names(disk: Disk, refs: Refs, without: frozenset[str]) -> tuple[list[Ref], list[str]]:
    """Drafts first, then names: a draft that becomes a name meanwhile is seen twice, never
    missed."""
    drafts = refs.drafts(disk.tmp, without)
    names, damaged = refs.kept()
    return [*drafts, *names], damaged


def _bring_back(disk: Disk, entry: Path) -> None:
    digest = entry.name.partition(".")[0]
    if DIGEST.fullmatch(digest):
        with contextlib.suppress(FileNotFoundError):
            disk.install(entry, digest)
