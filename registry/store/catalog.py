"""The catalog: a SQLite file derived from references and manifests. It may be deleted at any time.

Before it answers it is brought up to date with the folders: new, replaced and removed files are
noticed by name, inode, times and size. Whatever is wrong with it, it is made anew; a newer
kvbridge's catalog is left alone and ours is kept beside it.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvbridge.errors import CorruptFile, UnknownSchema
from kvbridge.format import CATALOG
from kvbridge.registry.store.records import Record
from kvbridge.registry.store.refs import Ref, Refs

APPLICATION_ID = 0x6B766272
RACY_NS = 2_000_000_000
MIGRATIONS = (
    """
    CREATE TABLE objects (
        digest TEXT PRIMARY KEY, kind TEXT NOT NULL, record TEXT, problem TEXT
    ) WITHOUT ROWID;
    CREATE TABLE refs (
        key TEXT PRIMARY KEY, stamp TEXT NOT NULL, digest TEXT, ref TEXT, problem TEXT
    ) WITHOUT ROWID;
    """,
    """
    ALTER TABLE objects ADD COLUMN translator TEXT;
    UPDATE objects SET translator = json_extract(record, '$.translator');
    CREATE INDEX bound ON objects (translator) WHERE translator IS NOT NULL;
    DROP TABLE refs;
    CREATE TABLE refs (
        key TEXT PRIMARY KEY, stamp TEXT NOT NULL, kind TEXT, scope TEXT, tag TEXT, digest TEXT,
        signed_version INTEGER, origin TEXT, label TEXT, problem TEXT
    ) WITHOUT ROWID;
    """,
)
SCHEMA = len(MIGRATIONS)


@dataclass(frozen=True)
class Entry:
    """One reference as listed: what it names, the object's record, and what is wrong with either
    (None: nothing)."""

    ref: Ref | None
    problem: str | None
    raw: str | None

    @cached_property
    def record(self) -> Record | None:
        """The object's record, None where it cannot be read."""
        return None if self.raw is None else Record.from_json(json.loads(self.raw))


class Catalog:
    """The derived catalog of one store; `describe` reads an object's record out of its folder."""

    def __init__(
        self, home: Path, refs: Refs, objects: Path, describe: Callable[[str], Record]
    ) -> None:
        self._home, self._refs, self._objects, self._describe = home, refs, objects, describe

    def entries(self) -> list[Entry]:
        """Every reference with its record, up to date and sorted; read-only stores are listed from
        memory."""
        rows = self._query(
            "SELECT r.kind, r.scope, r.tag, r.digest, r.signed_version, r.origin, r.label,"
            " coalesce(r.problem, o.problem, iif(o.digest IS NULL, 'missing', NULL)), o.record"
            " FROM refs r LEFT JOIN objects o USING (digest)"
            " ORDER BY r.kind IS NULL, r.kind <> 'translator', r.label, r.kind, r.tag, r.key"
        )
        return [
            Entry(
                None if row[0] is None else Ref(row[0], tuple(row[1].split("\n")), *row[2:7]),
                row[7],
                row[8],
            )
            for row in rows
        ]

    def rebuild(self) -> int:
        """Makes the catalog anew from the manifests; returns how many objects it holds."""
        self._delete(self._path())
        return self._query("SELECT count(*) FROM objects")[0][0]

    def refresh(self) -> None:
        """Brings the catalog up to date now, so that the next listing is quick; a failure costs
        nothing else."""
        with suppress(sqlite3.Error, OSError), closing(self._open(self._path())) as db:
            self._sync(db)

    def _query(self, statement: str) -> list[tuple]:
        """Rows of an up-to-date catalog: of the file, of the file made anew where it is damaged,
        else of memory."""
        path = self._path()
        for _ in range(2):
            try:
                return self._rows(path, statement)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                    break
                self._delete(path)
            except sqlite3.DatabaseError:
                self._delete(path)
        return self._rows(":memory:", statement)

    def _rows(self, path: Path | str, statement: str) -> list[tuple]:
        with closing(self._open(path)) as db:
            self._sync(db)
            return db.execute(statement).fetchall()

    def _path(self) -> Path:
        """Our file: beside the usual one where that was written by a newer version."""
        path = self._home / CATALOG
        try:
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
                newer = db.execute("PRAGMA user_version").fetchone()[0] > SCHEMA
        except sqlite3.Error:
            newer = False
        return path.with_name(f"catalog.v{SCHEMA}.sqlite") if newer else path

    def _open(self, path: Path | str) -> sqlite3.Connection:
        return _prepare(sqlite3.connect(path, timeout=10, isolation_level=None))

    def _delete(self, path: Path) -> None:
        for suffix in ("", "-wal", "-shm"):
            with suppress(OSError):
                path.with_name(path.name + suffix).unlink()

    def _sync(self, db: sqlite3.Connection) -> None:
        known_refs = dict(db.execute("SELECT key, stamp FROM refs"))
        known_objects = dict(db.execute("SELECT digest, problem IS NULL FROM objects"))
        now = time.time_ns()
        stamps = {
            key: stamp
            for key, entry in self._refs.scan()
            if (stamp := _stamp(entry, now)) is not None
        }
        with os.scandir(self._objects) as entries:
            present = {entry.name for entry in entries}
        changed = [
            key for key, stamp in stamps.items() if stamp == "" or known_refs.get(key) != stamp
        ]
        gone = known_refs.keys() - stamps.keys()
        new, lost = {d for d in present if not known_objects.get(d)}, known_objects.keys() - present
        if not (changed or gone or new or lost):
            return
        ref_rows = [self._ref_row(key, stamps[key]) for key in changed]
        object_rows = [self._object_row(digest) for digest in new]
        db.execute("BEGIN IMMEDIATE")
        _apply(db, ref_rows, gone, object_rows, lost)
        db.execute("COMMIT")

    def _ref_row(self, key: str, stamp: str) -> tuple:
        try:
            ref = self._refs.read(key)
        except (CorruptFile, OSError) as error:
            return key, stamp, *[None] * 7, f"damaged: {error}"
        if ref is None:
            return key, "", *[None] * 7, "vanished"
        scope = "\n".join(ref.scope)
        return (
            key,
            stamp,
            ref.kind,
            scope,
            ref.tag,
            ref.digest,
            ref.signed_version,
            ref.origin,
            ref.label,
            None,
        )

    def _object_row(self, digest: str) -> tuple:
        try:
            record = self._describe(digest)
        except (CorruptFile, UnknownSchema, OSError) as error:
            return digest, "", None, f"damaged: {error}", None
        return digest, record.kind, json.dumps(record.to_json()), None, record.translator


def _prepare(db: sqlite3.Connection) -> sqlite3.Connection:
    """Pragmas and migrations; raises sqlite3.DatabaseError for a file that is no sound catalog of
    ours."""
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        tables = {
            name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
        owner = db.execute("PRAGMA application_id").fetchone()[0]
        if (
            version > SCHEMA
            or (version == 0) != (not tables)
            or (tables and owner != APPLICATION_ID)
        ):
            raise sqlite3.DatabaseError("not a catalog of this version")
        if version < SCHEMA:
            _migrate(db)
        if db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("damaged")
    except BaseException:
        db.close()
        raise
    return db


def _migrate(db: sqlite3.Connection) -> None:
    """Steps from whatever version the file has to ours, all in one transaction."""
    db.execute("BEGIN IMMEDIATE")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    for step in MIGRATIONS[version:]:
        for statement in filter(str.strip, step.split(";")):
            db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA}")
    db.execute("COMMIT")


def _apply(
    db: sqlite3.Connection,
    refs: list[tuple],
    gone: Iterable[str],
    objects: list[tuple],
    lost: Iterable[str],
) -> None:
    db.executemany("DELETE FROM refs WHERE key = ?", [(key,) for key in gone])
    db.executemany("DELETE FROM objects WHERE digest = ?", [(digest,) for digest in lost])
    db.executemany(
        "INSERT OR REPLACE INTO objects (digest, kind, record, problem, translator)"
        " VALUES (?, ?, ?, ?, ?)",
        objects,
    )
    db.executemany("INSERT OR REPLACE INTO refs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", refs)


def _stamp(entry: os.DirEntry[str], now_ns: int) -> str | None:
    """What changes when a file is replaced; empty (never equal) where it changed too recently to be
    told apart."""
    try:
        info = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if abs(now_ns - info.st_ctime_ns) < RACY_NS:
        return ""
    return f"{info.st_ino}.{info.st_ctime_ns}.{info.st_mtime_ns}.{info.st_size}"
