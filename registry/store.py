"""The asset store: content-addressed objects, named by references, published whole or not at all. No torch.

The order is what keeps it whole. A writer copies the object aside and syncs it; drafts the name; makes sure that the
object stands in its place; and moves the draft to where names are read, in one rename. A collection moves an object to
the trash, then reads drafts and names (in this order) once more, and brings back what one of them stands for. So no
step relies on a lock, on the clock or on another process being alive.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from kvbridge.errors import CorruptFile, FileError, NotInStore, Refused, StoreError, UsageError
from kvbridge.files import SUMS, read_json, sync_folder, verify_folder
from kvbridge.geometry import KVGeometry
from kvbridge.manifest import Manifest
from kvbridge.registry.admission import Admitted, Policy, Progress, admit
from kvbridge.registry.catalog import Catalog, Entry
from kvbridge.registry.collect import Plan, execute, make_plan
from kvbridge.registry.disk import Disk, FileWriter, disk_errors, tree_bytes
from kvbridge.registry.kinds import KINDS, folder_files, kind_of
from kvbridge.registry.records import DIGEST, Record, record_of
from kvbridge.registry.refs import Ref, Refs, check_tag
from kvbridge.registry.signing import Statement, verify_statement

_ANY = Policy(max_weights_bytes=1 << 62)


def default_home() -> Path:
    """`KVBRIDGE_HOME`, else `kvbridge` in `HF_HOME`, else in the Hub's usual folder."""
    if home := os.environ.get("KVBRIDGE_HOME"):
        return Path(home).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")).expanduser() / "kvbridge"


class LocalStore:
    """A store in a folder. Any number of processes may use it at once."""

    def __init__(self, home: str | Path | None = None, policy: Policy | None = None) -> None:
        self.home = default_home() if home is None else Path(home)
        self.policy = policy or Policy()
        self._disk = Disk(self.home)
        self._refs = Refs(self._disk.refs)
        self._catalog = Catalog(self.home, self._refs, self._disk.objects, self._describe)

    # Publishing

    def publish(
        self,
        source: str | Path | Mapping[str, Path],
        *,
        tag: str = "main",
        signature: str | Path | Mapping[str, Path] | None = None,
        origin: str | None = None,
        progress: Progress = lambda done, total: None,
    ) -> Ref:
        """Admits a translator asset (a folder, or file name → path) and names it (sender, receiver, tag).

        When this returns, the object and its name survive power loss. Until the very last step the tag stands for
        what it stood for before. Raises FileError or Refused where admission says no, StoreError where the disk does.
        """
        files, name = _source(source)
        check_tag(tag)
        if kind_of(frozenset(files)) != "translator":
            raise UsageError(
                f"{name}: expected a translator asset; attach a {kind_of(frozenset(files))} to one instead"
            )

        def ref_of(record: Record) -> Ref:
            ref = replace(_translator_ref(record, tag), origin=origin)
            return replace(ref, signed_version=self._check_signature(ref, signature))

        ref = self._publish(files, name, ref_of, None, progress)
        if signature is not None:
            self.attach(signature)
        return ref

    def attach(
        self,
        source: str | Path | Mapping[str, Path],
        *,
        tag: str = "main",
        progress: Progress = lambda done, total: None,
    ) -> Ref:
        """Admits a control set, calibration or signature of a translator that is in the store, under its own tag."""
        files, name = _source(source)
        check_tag(tag)
        kind = kind_of(frozenset(files))
        if kind == "translator":
            raise UsageError(f"{name}: expected a control set, a calibration or a signature, found a translator")
        description = KINDS[kind].description
        record, _ = record_of(kind, "", 0, read_json(files[description]), f"{name}/{description}")
        translator = record.translator or ""
        manifest = self.manifest(translator)
        return self._publish(
            files,
            name,
            lambda r: Ref(kind, (r.translator or "",), tag, r.digest, label=f"{kind} of {translator[:12]}"),
            (translator, manifest),
            progress,
        )

    def _publish(
        self,
        files: Mapping[str, Path],
        name: str,
        ref_of: Callable[[Record], Ref],
        bound_to: tuple[str, Manifest] | None,
        progress: Progress,
    ) -> Ref:
        with disk_errors(f"publishing {name}"):
            self._disk.create()
            with self._disk.stage() as stage:
                admitted = self._write(files, name, stage / "object", bound_to, progress)
                if bound_to is not None and admitted.record.translator != bound_to[0]:
                    raise CorruptFile(f"{name}: it changed while it was read")
                ref = ref_of(admitted.record)
                self._refs.draft(ref, stage)
                self._put(stage / "object", ref.digest)
                self._refs.commit(ref, stage)
        self._catalog.refresh()
        return ref

    def _write(
        self,
        files: Mapping[str, Path],
        name: str,
        folder: Path,
        bound_to: tuple[str, Manifest] | None,
        progress: Progress,
    ) -> Admitted:
        """Copies an object into `folder` while admitting it; the folder and its files are synced."""
        folder.mkdir()
        writers: list[FileWriter] = []

        def sink(file_name: str) -> FileWriter:
            writers.append(FileWriter(folder / file_name))
            return writers[-1]

        try:
            admitted = admit(files, name, self.policy, bound_to=bound_to, sink=sink, progress=progress)
        finally:
            for writer in writers:
                writer.abandon()
        sync_folder(folder)
        return admitted

    def _put(self, staged: Path, digest: str) -> None:
        """Makes the object stand in its place: the one that is there, if it is sound, else the fresh copy."""
        if self._disk.install(staged, digest):
            return
        try:
            self.verify(digest)
        except (FileError, NotInStore):
            if not self._disk.install(staged, digest):
                self.verify(digest)

    def _check_signature(self, ref: Ref, signature: str | Path | Mapping[str, Path] | None) -> int | None:
        """The version that the signature states; refuses none, a wrong one and an older one where a policy asks."""
        if not self.policy.require_signature:
            return None
        if signature is None:
            raise Refused("this store's policy asks for a signature and none was given; sign the asset, or lift it")
        files, name = _source(signature)
        statement: Statement = verify_statement(files, name, self.policy.public_keys)
        if statement.translator != ref.digest:
            raise Refused(f"{name}: it signs {statement.translator}, expected {ref.digest}")
        before = self._refs.read(ref.key)
        if before is not None and before.signed_version is not None and statement.version < before.signed_version:
            raise Refused(
                f"{name}: version {statement.version} is older than {before.signed_version}, which tag {ref.tag!r} "
                "stands for; publish it under another tag, or remove that one first"
            )
        return statement.version

    # Reading

    def find(self, sender: KVGeometry, receiver: KVGeometry, tag: str = "main") -> Path | None:
        """Folder of the translator for exactly these two models, None where there is none."""
        ref = self.ref("translator", (sender.digest, receiver.digest), tag)
        return None if ref is None else self.path(ref.digest)

    def attached(self, translator: str, kind: str, tag: str = "main") -> Path | None:
        """Folder of a translator's control set, calibration or signature, None where there is none."""
        ref = self.ref(kind, (translator,), tag)
        return None if ref is None else self.path(ref.digest)

    def bound(self, translator: str) -> list[Ref]:
        """References of everything that is bound to a translator, sorted by kind and tag."""
        with disk_errors("reading the store's names"):
            refs, _ = self._refs.all()
        return sorted(
            (r for r in refs if r.kind != "translator" and r.scope == (translator,)), key=lambda r: (r.kind, r.tag)
        )

    def ref(self, kind: str, scope: tuple[str, ...], tag: str = "main") -> Ref | None:
        """The reference of that name as it stands on disk now, None where there is none."""
        with disk_errors(f"reading tag {tag}"):
            return self._refs.read(Ref(kind, scope, check_tag(tag), "").key)

    def path(self, digest: str) -> Path:
        """Folder of an object; its bytes are checked by whoever loads it. Raises NotInStore."""
        if not DIGEST.fullmatch(digest):
            raise UsageError(f"expected a digest of 64 hexadecimal digits, found {digest[:80]!r}")
        with disk_errors(f"looking up {digest[:12]}"):
            if not (self._disk.objects / digest).is_dir() and not self._disk.restore(digest):
                aside = any(self._disk.quarantine.glob(f"{digest}.*"))
                why = "it failed its digest and is in quarantine" if aside else "it is not in the store"
                raise NotInStore(f"{digest}: {why}; publish or pull it again")
        return self._disk.objects / digest

    def manifest(self, digest: str) -> Manifest:
        """Manifest of a translator in the store."""
        path = self.path(digest) / KINDS["translator"].description
        return Manifest.from_json(read_json(path), str(path))

    def entries(self) -> list[Entry]:
        """Every reference with its record and what is wrong with it, sorted by pair, kind and tag."""
        if not self._disk.objects.is_dir():
            return []
        with disk_errors("listing the store"):
            entries = self._catalog.entries()
            lost = [e.ref.digest for e in entries if e.problem == "missing" and e.ref is not None]
            if [digest for digest in lost if self._disk.restore(digest)]:
                entries = self._catalog.entries()
        return entries

    def select(self, name: str) -> Entry:
        """The entry that `SENDER..RECEIVER[@TAG]` or the beginning of a digest (6 or more digits) names."""
        entries = self.entries()
        if DIGEST.fullmatch(name.ljust(64, "0")) and len(name) >= 6:
            found = {e.ref.digest: e for e in reversed(entries) if e.ref is not None and e.ref.digest.startswith(name)}
        else:
            found = {e.ref.key: e for e in entries if e.ref is not None and name in _names(e.ref)}
        if not found:
            raise NotInStore(
                f"{name[:200]}: no such asset; expected SENDER..RECEIVER[@TAG] or a digest, see `kvbridge registry ls`"
            )
        if len(found) > 1:
            digests = ", ".join(sorted(e.ref.digest[:12] for e in found.values() if e.ref is not None)[:6])
            raise UsageError(f"{name[:200]}: stands for {len(found)} assets ({digests}); name one by its digest")
        return next(iter(found.values()))

    def verify(self, digest: str) -> Record:
        """Reads an object whole and admits it again; one that fails its digest goes to the quarantine.

        Raises CorruptFile with the reason. What cannot be read, or is refused for another reason than its digest
        (another kvbridge may take it), stays where it is.
        """
        folder = self.path(digest)
        try:
            record = admit(folder_files(folder), str(folder), _ANY).record
            if record.digest == digest:
                return record
            problem: Exception = CorruptFile(f"{folder}: {SUMS} has digest {record.digest}")
        except OSError as error:
            raise StoreError(f"{folder}: cannot be read: {error.strerror}; check the disk") from error
        except (FileError, Refused) as error:
            if isinstance(error.__cause__, OSError) or _intact(folder, digest):
                raise
            problem = error
        with disk_errors(f"setting {digest[:12]} aside"):
            aside = self._disk.set_aside(digest, str(problem))
        self._catalog.refresh()
        raise CorruptFile(f"{problem}; moved to {aside}; publish or pull it again") from problem

    # Changing

    def tag(self, digest: str, tag: str) -> Ref:
        """Gives a translator in the store one more tag; copies nothing."""
        ref = _translator_ref(self._describe(self.path(digest).name), check_tag(tag))
        with disk_errors(f"tagging {digest[:12]}"), self._disk.stage() as stage:
            self._refs.draft(ref, stage)
            self.path(digest)
            self._refs.commit(ref, stage)
        self._catalog.refresh()
        return ref

    def remove(self, ref: Ref) -> None:
        """Removes one name; the object stays until a collection finds no other name for it."""
        with disk_errors(f"removing {ref.tag}"):
            self._refs.remove(ref.key)
        self._catalog.refresh()

    def collect(self, plan: Plan | None = None) -> Plan:
        """Deletes what no name stands for, as planned (by default now); returns what was deleted."""
        with disk_errors("collecting"):
            self._disk.create()
            done = execute(self._disk, self._refs, self.plan() if plan is None else plan)
        self._catalog.refresh()
        return done

    def plan(self) -> Plan:
        """What a collection would delete now; changes nothing."""
        with disk_errors("planning a collection"):
            return make_plan(self._disk, self._refs)

    def rebuild(self) -> int:
        """Makes the catalog anew from the manifests; returns how many objects it holds."""
        with disk_errors("rebuilding the catalog"):
            self._disk.create()
            return self._catalog.rebuild()

    def _describe(self, digest: str) -> Record:
        folder = self._disk.objects / digest
        if not DIGEST.fullmatch(digest):
            raise CorruptFile(f"{folder}: not an object of this store")
        kind = kind_of(frozenset(folder_files(folder)))
        path = folder / KINDS[kind].description
        return record_of(kind, digest, tree_bytes(folder), read_json(path), str(path))[0]


def _source(source: str | Path | Mapping[str, Path]) -> tuple[Mapping[str, Path], str]:
    if isinstance(source, Mapping):
        return source, str(next(iter(source.values())).parent) if source else "nothing"
    return folder_files(Path(source)), str(source)


def _intact(folder: Path, digest: str) -> bool:
    """Whether a folder is byte for byte what has this digest, whatever its content is worth."""
    try:
        return verify_folder(folder, required=frozenset(folder_files(folder)) - {SUMS}) == digest
    except FileError:
        return False


def _names(ref: Ref) -> set[str]:
    return {f"{ref.label}@{ref.tag}", *([ref.label] if ref.tag == "main" else [])} if ref.label else set()


def _translator_ref(record: Record, tag: str) -> Ref:
    if record.sender is None or record.receiver is None:
        raise UsageError(f"{record.digest}: expected a translator, found a {record.kind}")
    scope = (record.sender.geometry, record.receiver.geometry)
    return Ref("translator", scope, tag, record.digest, label=f"{record.sender.model_id}..{record.receiver.model_id}")
