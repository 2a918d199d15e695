"""Which object a name stands for: one small file each, replaced by rename, self-describing and
checked when read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kvbridge.codec import Digest, convert, parse_json
from kvbridge.errors import CorruptFile, UsageError
from kvbridge.files import sync_folder
from kvbridge.format import MAX_REF_BYTES, REF_ASIDE, REF_DRAFT, REF_SCHEMA, REF_SUFFIX
from kvbridge.geometry import digest_json

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Ref:
    """A name and the digest it stands for.

    A translator is named by (sender geometry, receiver geometry, tag), an attachment by (translator
    digest, kind, tag): `kind`, `scope` and `tag`. `signed_version` is the version of the signed
    statement it was admitted with, `origin` where it was pulled from, `label` the pair's names for
    people.
    """

    kind: str
    scope: tuple[str, ...]
    tag: str
    digest: Digest
    signed_version: int | None = None
    origin: str | None = None
    label: str = ""

    @property
    def key(self) -> str:
        """File name without suffix: no part of a name is ever part of a path."""
        return digest_json([self.kind, list(self.scope), self.tag])

    def to_bytes(self) -> bytes:
        """The file's content."""
        return (json.dumps({"schema": REF_SCHEMA, **asdict(self)}, sort_keys=True) + "\n").encode()

    @classmethod
    def from_bytes(cls, raw: bytes, name: str) -> Ref:
        """Raises CorruptFile when it is not what `to_bytes` writes."""
        body = parse_json(raw, name)
        if not isinstance(body, dict) or body.pop("schema", None) != REF_SCHEMA:
            raise CorruptFile(f"{name}: not a reference of this store: expected {REF_SCHEMA}")
        return convert(body, cls, name)


def check_tag(tag: str) -> str:
    """Raises UsageError unless `tag` can be one."""
    if not _TAG.fullmatch(tag):
        raise UsageError(
            f"expected a tag of letters, digits, '.', '_' and '-' (at most 64), found {tag[:80]!r}"
        )
    return tag


class Refs:
    """The reference files of one store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, key: str) -> Ref | None:
        """The reference of that key, None where there is none; raises CorruptFile where it is
        damaged."""
        path = self.folder / f"{key}{REF_SUFFIX}"
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_REF_BYTES)
        except FileNotFoundError:
            return None
        ref = Ref.from_bytes(raw, str(path))
        if ref.key != key:
            raise CorruptFile(f"{path}: names {ref.kind} {ref.tag!r}, which belongs elsewhere")
        return ref

    def draft(self, ref: Ref, stage: Path) -> None:
        """Writes and syncs the reference in the writer's own folder. From here on no collection
        takes the object."""
        with (stage / REF_DRAFT).open("xb") as file:
            file.write(ref.to_bytes())
            file.flush()
            os.fsync(file.fileno())

    def commit(self, ref: Ref, stage: Path) -> None:
        """Moves the draft into place, durably: one rename, which fails if a collection took the
        writer's folder."""
        os.rename(stage / REF_DRAFT, self.folder / f"{ref.key}{REF_SUFFIX}")
        sync_folder(self.folder)

    def remove(self, key: str, digest: str) -> bool:
        """Removes the reference that stands for `digest`, durably; False where there is none, or
        not for that any more."""
        aside = self.take(key, digest)
        removed = aside is not None and self.end(aside)
        sync_folder(self.folder)
        return removed

    def take(self, key: str, why: str) -> Path | None:
        """Moves a reference aside, to be looked at once more and ended: `why` is the digest it is
        removed for, or a word."""
        aside = self.folder / f"{key}.{why}.{secrets.token_hex(8)}{REF_ASIDE}"
        try:
            os.rename(self.folder / f"{key}{REF_SUFFIX}", aside)
        except FileNotFoundError:
            return None
        return aside

    def end(self, aside: Path, wanted: Callable[[Ref], bool] | None = None) -> bool:
        """Deletes what was taken aside, or puts it back: where `wanted` says so, by default where
        it stands for another digest than it was taken for, and so was committed since. True where
        it is gone for good."""
        key, why, *_ = aside.name.split(".")
        try:
            ref = Ref.from_bytes(aside.read_bytes()[:MAX_REF_BYTES], str(aside))
            back = ref.digest != why if wanted is None else wanted(ref)
        except CorruptFile:
            back = True
        except FileNotFoundError:
            return True
        if back:
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.link(aside, self.folder / f"{key}{REF_SUFFIX}")
        aside.unlink(missing_ok=True)
        return not back

    def asides(self) -> list[Path]:
        """What removals that run, or were killed, have taken aside."""
        return sorted(self.folder.glob(f"*{REF_ASIDE}"))

    def scan(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Key and directory entry of every reference file."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(REF_SUFFIX):
                    yield entry.name.removesuffix(REF_SUFFIX), entry

    def drafts(self, tmp: Path, without: frozenset[str]) -> list[Ref]:
        """The drafts in the writers' folders but those named `without`; what cannot be read is not
        yet one."""
        readable = []
        for path in (p for p in tmp.glob(f"*/{REF_DRAFT}") if p.parent.name not in without):
            with contextlib.suppress(CorruptFile, OSError):
                readable.append(Ref.from_bytes(path.read_bytes()[:MAX_REF_BYTES], str(path)))
        return readable

    def all(self) -> tuple[list[Ref], list[str]]:
        """Every readable reference, and the names of the damaged files."""
        return self._read(set())

    def kept(self) -> tuple[list[Ref], list[str]]:
        """As `all`, with what lies aside and may be put back: what a collection spares. A key may
        stand twice."""
        readable, damaged = self._read(set())
        for aside in self.asides():
            with contextlib.suppress(CorruptFile, OSError):
                readable.append(Ref.from_bytes(aside.read_bytes()[:MAX_REF_BYTES], str(aside)))
        back, unreadable = self._read(
            {ref.key for ref in readable} | {name.removesuffix(REF_SUFFIX) for name in damaged}
        )
        return [*readable, *back], [*damaged, *unreadable]

    def _read(self, known: set[str]) -> tuple[list[Ref], list[str]]:
        readable, damaged = [], []
        for key in (key for key, _ in self.scan() if key not in known):
            try:
                ref = self.read(key)
                if ref is not None:
                    readable.append(ref)
            except (CorruptFile, OSError):
                damaged.append(f"{key}{REF_SUFFIX}")
        return readable, damaged
