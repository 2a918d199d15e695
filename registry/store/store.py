"""The asset store: content-addressed objects, named by references, published whole or not at all.
No torch.

A writer copies the object aside and syncs it; drafts the name; makes sure that the object stands in
its place; and moves the draft to where names are read, in one rename. Whoever takes something away
moves it aside first, looks again, and brings back what has come to be wanted since: a collection an
object that a draft or name stands for, a removal a name that stands for another object by now, a
verification an object that was published anew. So what is kept never rests on a lock, on the clock
or on another process being alive.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from kvbridge.asset.manifest import Manifest
from kvbridge.codec import read_json
from kvbridge.errors import CorruptFile, FileError, NotInStore, Refused, StoreError, UsageError
from kvbridge.files import verify_folder
from kvbridge.format import FOLDERS, SUMS, TRANSLATOR
from kvbridge.geometry import KVGeometry
from kvbridge.registry.store.admission import AdmissionPolicy, ByteProgress, admit
from kvbridge.registry.store.catalog import Catalog, Entry
from kvbridge.registry.store.collect import Plan, execute, make_plan
from kvbridge.registry.store.disk import Disk, disk_errors, tree_bytes
from kvbridge.registry.store.kinds import folder_files, kind_of
from kvbridge.registry.store.naming import select, translator_ref
from kvbridge.registry.store.publishing import Publisher, Source, source_files
from kvbridge.registry.store.records import DIGEST, Record, record_of
from kvbridge.registry.store.refs import Ref, Refs, check_tag

_ANY = AdmissionPolicy(max_weights_bytes=1 << 62)
"""What is in the store was admitted already: reading it again asks for its digest, not for its
size."""


def default_home() -> Path:
    """`KVBRIDGE_HOME`, else `kvbridge` in `HF_HOME`, else in the Hub's usual folder."""
    if home := os.environ.get("KVBRIDGE_HOME"):
        return Path(home).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    hub_home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(hub_home).expanduser() / "kvbridge"


class LocalStore:
    """A store in a folder. Any number of processes may use it at once."""

    def __init__(
        self, home: str | Path | None = None, policy: AdmissionPolicy | None = None
    ) -> None:
        self.home = default_home() if home is None else Path(home)
        self.policy = policy or AdmissionPolicy()
        self._disk = Disk(self.home)
        self._refs = Refs(self._disk.refs)
        self._publisher = Publisher(self._disk, self._refs, self.policy, self.verify)
        self._catalog = Catalog(self.home, self._refs, self._disk.objects, self._describe)

    # Publishing

    def publish(
        self,
        source: Source,
        *,
        tag: str = "main",
        signature: Source | None = None,
        origin: str | None = None,
        progress: ByteProgress = lambda done, total: None,
    ) -> Ref:
        """Admits a translator asset (a folder, or file name → path) and gives it a name: its two
        models and `tag`.

        When this returns, the object and its name survive power loss. Until the very last step the
        tag stands for what it stood for before. Raises FileError or Refused where admission says
        no, StoreError where the disk does.
        """
        files, name = source_files(source)
        check_tag(tag)
        kind = kind_of(frozenset(files))
        if kind != "translator":
            raise UsageError(f"{name}: expected a translator asset; attach a {kind} to one instead")

        def ref_of(record: Record) -> Ref:
            ref = replace(translator_ref(record, tag), origin=origin)
            return replace(ref, signed_version=self._publisher.signed_version(ref, signature))

        ref = self._publisher.publish(files, name, ref_of, None, progress)
        self._catalog.refresh()
        if signature is not None:
            self.attach(signature)
        return ref

    def attach(
        self,
        source: Source,
        *,
        tag: str = "main",
        progress: ByteProgress = lambda done, total: None,
    ) -> Ref:
        """Admits a control set, calibration or signature under its own tag.

        Its translator must be in the store: raises NotInStore where it is not, UsageError for a
        translator, and else what `publish` raises.
        """
        files, name = source_files(source)
        check_tag(tag)
        kind = kind_of(frozenset(files))
        if kind == "translator":
            raise UsageError(
                f"{name}: expected a control set, a calibration or a signature, found a translator"
            )
        description = FOLDERS[kind].description
        record, _ = record_of(kind, "", 0, read_json(files[description]), f"{name}/{description}")
        translator = record.translator or ""
        bound_to = (translator, self.manifest(translator))
        label = f"{kind} of {translator[:12]}"

        def ref_of(admitted: Record) -> Ref:
            return Ref(kind, (admitted.translator or "",), tag, admitted.digest, label=label)

        ref = self._publisher.publish(files, name, ref_of, bound_to, progress)
        self._catalog.refresh()
        return ref

    # Reading

    def find(self, sender: KVGeometry, receiver: KVGeometry, tag: str = "main") -> Path | None:
        """Folder of the translator for exactly these two models, None where there is none."""
        ref = self.ref("translator", (sender.digest, receiver.digest), tag)
        return None if ref is None else self.path(ref.digest)

    def attached(self, translator: str, kind: str, tag: str = "main") -> Path | None:
        """Folder of a translator's control set, calibration or signature, None where there is
        none."""
        ref = self.ref(kind, (translator,), tag)
        return None if ref is None else self.path(ref.digest)

    def bound(self, translator: str) -> list[Ref]:
        """References of everything that is bound to a translator, sorted by kind and tag."""
        with disk_errors("reading the store's names"):
            refs, _ = self._refs.all()
        attachments = [r for r in refs if r.kind != "translator" and r.scope == (translator,)]
        return sorted(attachments, key=lambda r: (r.kind, r.tag))

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
                why = "it is not in the store"
                if any(self._disk.quarantine.glob(f"{digest}.*")):
                    why = "it failed its digest and is in quarantine"
                raise NotInStore(f"{digest}: {why}; publish or pull it again")
        return self._disk.objects / digest

    def manifest(self, digest: str) -> Manifest:
        """Manifest of a translator in the store."""
        path = self.path(digest) / TRANSLATOR.description
        return Manifest.from_json(read_json(path), str(path))

    def entries(self) -> list[Entry]:
        """Every reference with its record and what is wrong with it, sorted by pair, kind and
        tag."""
        if not self._disk.objects.is_dir():
            return []
        with disk_errors("listing the store"):
            entries = self._catalog.entries()
            lost = [e.ref.digest for e in entries if e.problem == "missing" and e.ref is not None]
            # A collection that was killed leaves objects in the trash that a name still stands for.
            restored = [digest for digest in lost if self._disk.restore(digest)]
            if restored:
                entries = self._catalog.entries()
        return entries

    def select(self, name: str) -> Entry:
        """The entry that `SENDER..RECEIVER[@TAG]` or the beginning of a digest (6 or more digits)
        names."""
        return select(self.entries(), name)

    def verify(self, digest: str) -> Record:
        """Reads an object whole and admits it again; one that fails its digest goes to the
        quarantine.

        Raises CorruptFile with the reason. What cannot be read, or is refused for another reason
        than its digest (another kvbridge may take it), stays where it is.
        """
        folder = self.path(digest)
        try:
            record = admit(folder_files(folder), str(folder), _ANY).record
            if record.digest == digest:
                return record
            problem: Exception = CorruptFile(f"{folder}: {SUMS} has digest {record.digest}")
        except OSError as error:
            raise StoreError(
                f"{folder}: cannot be read: {error.strerror}; check the disk"
            ) from error
        except (FileError, Refused) as error:
            if isinstance(error.__cause__, OSError) or _intact(folder, digest):
                raise
            problem = error
        with disk_errors(f"setting {digest[:12]} aside"):
            aside = self._disk.set_aside(
                digest, str(problem), lambda folder: _intact(folder, digest)
            )
        self._catalog.refresh()
        if aside is None:
            # What stood there was published anew while it was read: read that one.
            return self.verify(digest)
        raise CorruptFile(f"{problem}; moved to {aside}; publish or pull it again") from problem

    # Changing

    def tag(self, digest: str, tag: str) -> Ref:
        """Gives a translator in the store one more tag; copies nothing."""
        ref = translator_ref(self._describe(self.path(digest).name), check_tag(tag))
        with disk_errors(f"tagging {digest[:12]}"), self._disk.stage() as stage:
            self._refs.draft(ref, stage)
            # From here no collection takes the object; one that took it before is undone, or seen.
            self.path(digest)
            self._refs.commit(ref, stage)
        self._catalog.refresh()
        return ref

    def remove(self, ref: Ref) -> bool:
        """Removes one name; the object stays until a collection finds no other name for it.

        False, and nothing is removed, where the name is gone or has come to stand for another
        object.
        """
        with disk_errors(f"removing {ref.tag}"):
            removed = self._refs.remove(ref.key, ref.digest)
        self._catalog.refresh()
        return removed

    def collect(self, plan: Plan | None = None) -> Plan:
        """Deletes what no name stands for, as planned (by default now); returns what was
        deleted."""
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
        """An object's record as its own description says, read from disk."""
        folder = self._disk.objects / digest
        if not DIGEST.fullmatch(digest):
            raise CorruptFile(f"{folder}: not an object of this store")
        kind = kind_of(frozenset(folder_files(folder)))
        path = folder / FOLDERS[kind].description
        return record_of(kind, digest, tree_bytes(folder), read_json(path), str(path))[0]


def _intact(folder: Path, digest: str) -> bool:
    """Whether a folder is byte for byte what has this digest, whatever its content is worth."""
    try:
        return verify_folder(folder, required=frozenset(folder_files(folder)) - {SUMS}) == digest
    except FileError:
        return False
