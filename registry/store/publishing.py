"""How an object gets into the store: copied aside while it is admitted, named in a draft, put in
place, named for good.

The order is what keeps the store whole. The copy and the draft are durable before the object takes
its place, and the last step is one rename: until then the name stands for what it stood for before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from kvbridge.asset.manifest import Manifest
from kvbridge.errors import CorruptFile, FileError, NotInStore, Refused
from kvbridge.files import sync_folder
from kvbridge.registry.store.admission import AdmissionPolicy, Admitted, ByteProgress, admit
from kvbridge.registry.store.disk import Disk, FileWriter, disk_errors
from kvbridge.registry.store.kinds import folder_files
from kvbridge.registry.store.records import Record
from kvbridge.registry.store.refs import Ref, Refs
from kvbridge.registry.store.signing import Statement, verify_statement

Source = str | Path | Mapping[str, Path]


def source_files(source: Source) -> tuple[Mapping[str, Path], str]:
    """File name → path of a folder, or of what is such a mapping already; and a name for
    messages."""
    if isinstance(source, Mapping):
        folders = [str(path.parent) for path in source.values()]
        return source, folders[0] if folders else "nothing"
    return folder_files(Path(source)), str(source)


class Publisher:
    """Writes into one store. `verify` reads an object of the store whole and raises where it is not
    sound."""

    def __init__(
        self, disk: Disk, refs: Refs, policy: AdmissionPolicy, verify: Callable[[str], object]
    ) -> None:
        self._disk, self._refs, self._policy, self._verify = disk, refs, policy, verify

    def publish(
        self,
        files: Mapping[str, Path],
        name: str,
        ref_of: Callable[[Record], Ref],
        bound_to: tuple[str, Manifest] | None,
        progress: ByteProgress,
    ) -> Ref:
        """Admits the files and commits the name that `ref_of` gives their record; durable when it
        returns.

        Where signatures are asked for, writers take turns from `ref_of`, which looks at the version
        that stands, to the commit: two that raced could else leave the older one. Only their order
        rests on that lock.
        """
        with disk_errors(f"publishing {name}"):
            self._disk.create()
            with self._disk.stage() as stage:
                admitted = self._write(files, name, stage / "object", bound_to, progress)
                if bound_to is not None and admitted.record.translator != bound_to[0]:
                    raise CorruptFile(f"{name}: it changed while it was read")
                signed = self._policy.require_signature
                with self._disk.turn() if signed else contextlib.nullcontext():
                    ref = ref_of(admitted.record)
                    self._refs.draft(ref, stage)
                    self._put(stage / "object", ref.digest)
                    self._refs.commit(ref, stage)
        return ref

    def signed_version(self, ref: Ref, signature: Source | None) -> int | None:
        """The version that the signature states; refuses none, a wrong one and an older one where a
        policy asks."""
        if not self._policy.require_signature:
            return None
        if signature is None:
            raise Refused(
                "this store's policy asks for a signature and none was given; "
                "sign the asset, or lift it"
            )
        files, name = source_files(signature)
        statement: Statement = verify_statement(files, name, self._policy.public_keys)
        if statement.translator != ref.digest:
            raise Refused(f"{name}: it signs {statement.translator}, expected {ref.digest}")
        before = self._refs.read(ref.key)
        stands = None if before is None else before.signed_version
        if stands is not None and statement.version < stands:
            # An old statement stays validly signed for ever; replaying it would bring back a bug.
            raise Refused(
                f"{name}: version {statement.version} is older than {stands}, which tag "
                f"{ref.tag!r} stands for; publish it under another tag, or remove that one first"
            )
        return statement.version

    def _write(
        self,
        files: Mapping[str, Path],
        name: str,
        folder: Path,
        bound_to: tuple[str, Manifest] | None,
        progress: ByteProgress,
    ) -> Admitted:
        """Copies an object into `folder` while admitting it; the folder and its files are
        synced."""
        folder.mkdir()
        writers: list[FileWriter] = []

        def sink(file_name: str) -> FileWriter:
            writers.append(FileWriter(folder / file_name))
            return writers[-1]

        try:
            admitted = admit(
                files, name, self._policy, bound_to=bound_to, sink=sink, progress=progress
            )
        finally:
            for writer in writers:
                writer.abandon()
        sync_folder(folder)
        return admitted

    def _put(self, staged: Path, digest: str) -> None:
        """Makes the object stand in its place: the one that is there, if it is sound, else the
        fresh copy."""
        if self._disk.install(staged, digest):
            return
        try:
            self._verify(digest)
        except (FileError, NotInStore):
            if not self._disk.install(staged, digest):
                self._verify(digest)
