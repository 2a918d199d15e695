"""The catalog may be deleted, damaged, old, newer or unwritable: the store answers from what is on
disk."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from kvbridge.registry.store import catalog
from tests.registry import assets


@pytest.fixture
def filled(store, asset, newer, tmp_path):
    ref = store.publish(asset)
    store.publish(newer, tag="other")
    store.attach(assets.controls(tmp_path / "c", ref.digest))
    return store


def listed(store):
    return [(e.ref.label, e.ref.tag, e.record.kind, e.problem) for e in store.entries()]


def test_deleted(filled):
    before = listed(filled)
    assert len(before) == 3
    (filled.home / "catalog.sqlite").unlink()
    assert listed(filled) == before
    assert filled.rebuild() == 3
    assert listed(filled) == before


@pytest.mark.parametrize(
    "damage", ["truncated", "zeros", "text", "empty", "flipped", "foreign", "a folder"]
)
def test_damaged(filled, damage):
    before, path = listed(filled), filled.home / "catalog.sqlite"
    data = bytearray(path.read_bytes())
    if damage == "foreign":
        path.unlink()
        with closing(sqlite3.connect(path)) as db:
            db.execute("CREATE TABLE objects (mine TEXT)")
            db.commit()
    elif damage == "a folder":
        path.unlink()
        path.mkdir()
    else:
        middle = len(data) // 2
        flipped = (
            data[:middle]
            + bytes(b ^ 0xFF for b in data[middle : middle + 2048])
            + data[middle + 2048 :]
        )
        changed = {
            "truncated": data[:5000],
            "zeros": bytes(len(data)),
            "text": b"hello",
            "empty": b"",
            "flipped": flipped,
        }
        path.write_bytes(changed[damage])
    assert listed(filled) == before
    assert filled.rebuild() == 3


def test_from_a_newer_version_is_left_alone_and_ours_is_kept_beside(filled):
    before, path = listed(filled), filled.home / "catalog.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE objects ADD COLUMN invented TEXT")
        db.execute(f"PRAGMA user_version = {catalog.SCHEMA + 1}")
        db.commit()
    assert listed(filled) == before
    assert filled.rebuild() == 3
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == catalog.SCHEMA + 1
        assert "invented" in [row[1] for row in db.execute("PRAGMA table_info(objects)")]
    assert (filled.home / f"catalog.v{catalog.SCHEMA}.sqlite").exists()


def test_migrated_from_every_older_version(filled, monkeypatch):
    before, path = listed(filled), filled.home / "catalog.sqlite"
    for version in range(1, catalog.SCHEMA):
        path.unlink()
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            for step in catalog.MIGRATIONS[:version]:
                db.executescript(step)
            db.execute(
                "INSERT INTO objects VALUES ('x', 'controls', '{\"translator\": \"y\"}', NULL)"
            )
            db.execute(f"PRAGMA application_id = {catalog.APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {version}")
            catalog._prepare(db)
            assert db.execute("SELECT translator FROM objects WHERE digest = 'x'").fetchone() == (
                "y",
            )
            assert db.execute("PRAGMA user_version").fetchone()[0] == catalog.SCHEMA
        assert listed(filled) == before


def test_wrong_rows_are_noticed(filled):
    before, path = listed(filled), filled.home / "catalog.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("DELETE FROM refs")
        db.execute("INSERT INTO objects (digest, kind) VALUES ('ghost', 'translator')")
        db.commit()
    assert listed(filled) == before


def test_another_process_changes_the_store(filled, tmp_path):
    from kvbridge.registry.store import LocalStore

    listed(filled)
    other = LocalStore(filled.home)
    other.remove(other.select("org/sender..org/receiver@other").ref)
    other.collect()
    assert len(listed(filled)) == 2


def test_names_replaced_within_one_tick_of_the_clock_are_read_again(filled, asset, newer):
    for turn in range(6):
        ref = filled.publish(asset if turn % 2 else newer)
        assert ref.digest in [e.ref.digest for e in filled.entries() if e.ref.tag == "main"]


def test_busy(filled, monkeypatch):
    """Another process in the middle of a write: the listing waits, then answers from memory."""
    real = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **o: real(*a, **{**o, "timeout": 0.05}))
    before = listed(filled)
    (filled.home / "refs" / "zz.json").write_bytes(b"{}")
    with closing(sqlite3.connect(filled.home / "catalog.sqlite", isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        assert len(filled.entries()) == len(before) + 1
