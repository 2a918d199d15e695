"""Acting on an earlier look: whatever came in between is spared. Each test puts the other writer
exactly there."""

from __future__ import annotations

import shutil

import pytest

from kvbridge.errors import TransferFailed
from kvbridge.registry.hub import Hub
from kvbridge.registry.store import LocalStore
from kvbridge.registry.store.disk import Disk
from kvbridge.registry.store.refs import Refs
from tests.registry import assets


def before(monkeypatch, owner, name, act):
    """Runs `act` once, just before the first call of a function."""
    real, left = getattr(owner, name), [act]

    def changed(*args, **options):
        if left:
            left.pop()()
        return real(*args, **options)

    monkeypatch.setattr(owner, name, changed)


def test_a_name_that_was_replaced_is_not_removed(store, asset, newer):
    old = store.publish(asset)
    new = store.publish(newer)
    assert not store.remove(old)
    assert store.ref("translator", old.scope).digest == new.digest
    assert store.remove(new)
    assert not store.remove(new)


def test_a_name_committed_while_another_is_removed_is_put_back(store, asset, newer, monkeypatch):
    ref = store.publish(asset)
    before(monkeypatch, Refs, "take", lambda: store.publish(newer))
    assert not store.remove(ref)
    assert [e.problem for e in store.entries()] == [None]
    assert store.collect().objects == (ref.digest,)
    assert not list((store.home / "refs").glob("*.aside"))


def test_a_removal_that_was_killed_is_ended_by_the_next_collection(store, asset, newer):
    removed, kept = store.publish(asset), store.publish(newer, tag="kept")
    store._refs.take(removed.key, removed.digest)
    store._refs.take(kept.key, "0" * 64)
    assert store.bound(removed.digest) == store.entries() == [], "what lies aside is no name"
    assert store.plan().objects == (), "what is aside may be put back"
    store.collect()
    assert store.collect().objects == (removed.digest,)
    assert store.ref("translator", kept.scope, "kept") == kept


def test_attachments_of_a_translator_that_is_named_again_stay(store, asset, tmp_path, monkeypatch):
    ref = store.publish(asset)
    bound = store.attach(assets.controls(tmp_path / "c", ref.digest))
    store.remove(ref)
    plan = store.plan()
    assert plan.attachments == (bound.key,)
    before(monkeypatch, Refs, "take", lambda: LocalStore(store.home).publish(asset))
    assert store.collect(plan).attachments == ()
    assert store.attached(ref.digest, "controls") == store.path(bound.digest)


def test_a_collection_does_not_even_move_what_was_named_since_its_plan(
    store, asset, newer, monkeypatch
):
    """Somebody may be reading it."""
    ref = store.publish(asset)
    store.publish(newer)
    plan = store.plan()
    assert plan.objects == (ref.digest,)
    store.publish(asset, tag="kept")
    moved = []
    monkeypatch.setattr(Disk, "discard", lambda self, digest: moved.append(digest))
    store.collect(plan)
    assert moved == []


def test_an_object_named_just_before_it_is_moved_comes_back(store, asset, newer, monkeypatch):
    ref = store.publish(asset)
    store.publish(newer)
    before(monkeypatch, Disk, "discard", lambda: LocalStore(store.home).publish(asset, tag="kept"))
    assert store.collect().objects == ()
    assert store.verify(ref.digest)


@pytest.mark.parametrize("moment", ["publish", "attach"])
def test_downloads_that_another_pull_removed(store, asset, hub, tmp_path, monkeypatch, moment):
    """As happens where locks do nothing: it says so, and pulling again works."""
    ref = store.publish(asset)
    store.attach(assets.controls(tmp_path / "c", ref.digest))
    Hub(hub[0]).push(store, ref.digest, "org/pair")
    other = LocalStore(tmp_path / "other")
    before(
        monkeypatch,
        LocalStore,
        moment,
        lambda: shutil.rmtree(other.home / "downloads" / "org--pair"),
    )
    with pytest.raises(TransferFailed, match="pull again"):
        Hub(hub[0]).pull(other, "org/pair")
    assert Hub(hub[0]).pull(other, "org/pair").digest == ref.digest
    assert other.attached(ref.digest, "controls")


def test_a_fresh_copy_is_not_quarantined_for_the_damaged_one(store, asset, monkeypatch):
    ref = store.publish(asset)
    (store.path(ref.digest) / "README.md").write_bytes(b"")
    before(monkeypatch, Disk, "set_aside", lambda: LocalStore(store.home).publish(asset))
    assert store.verify(ref.digest).digest == ref.digest
    assert store.path(ref.digest).is_dir()
