"""Whatever stops a publish or a collection, the old asset is intact or the new one whole.

KVBRIDGE_FAULTS=all runs every point; otherwise a share of them.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest

from benchmarks.faults import ptrace
from benchmarks.faults.powerloss import Machine
from kvbridge.registry.store import LocalStore
from tests.registry import assets

WHY_NOT = ptrace.available()
ALL = os.environ.get("KVBRIDGE_FAULTS") == "all"
pytestmark = pytest.mark.skipif(
    WHY_NOT is not None, reason=f"system calls cannot be traced here: {WHY_NOT}"
)
CHANGING = {
    "openat",
    "mkdir",
    "write",
    "pwrite64",
    "fsync",
    "fdatasync",
    "rename",
    "ftruncate",
    "unlink",
    "rmdir",
}


class World:
    """A home with one published asset, from which every run starts, and a newer asset of the same
    pair."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.old_asset, self.new_asset = (
            assets.build(folder / "old"),
            assets.build(folder / "new", seed=1),
        )
        template = LocalStore(folder / "template")
        self.new = template.publish(self.new_asset).digest
        template.collect()
        self.ref = template.publish(self.old_asset)
        self.old = self.ref.digest

    def fresh(self, *, garbage: bool = False) -> LocalStore:
        """The starting home; the newer asset lies in it without a name where there is to be
        `garbage`."""
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.copytree(self.folder / "template", self.home)
        store = LocalStore(self.home)
        if not garbage:
            shutil.rmtree(self.home / "objects" / self.new)
        return store

    def check(self, home: Path, allowed: set[str]) -> str:
        """The tag stands for something allowed and whole, a collection leaves only that, and
        publishing works."""
        store = LocalStore(home)
        ref = store.ref("translator", self.ref.scope)
        assert ref is not None, "the tag is gone"
        assert ref.digest in allowed
        store.verify(ref.digest)
        assert [e.problem for e in store.entries()] == [None]
        store.collect()
        left = [p.name for f in ("objects", "tmp", "trash") for p in (home / f).iterdir()]
        assert left == [ref.digest]
        return ref.digest


@pytest.fixture(scope="module")
def world():
    folder = Path(
        tempfile.mkdtemp(
            prefix="kvbridge-faults-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        )
    )
    yield World(folder)
    shutil.rmtree(folder)


def share(points: int, offset: int, wanted: int) -> range:
    """Every point, or about `wanted` of them evenly."""
    return (
        range(points)
        if ALL
        else range(offset % max(1, points // wanted), points, max(1, points // wanted))
    )


def test_killed_at_the_boundaries_of_a_publish(world):
    store = world.fresh()
    points = ptrace.stops(lambda: store.publish(world.new_asset))
    seen = set()
    for point in share(points, 0, 60):
        store = world.fresh()
        killed = ptrace.kill_at(partial(store.publish, world.new_asset), point) is None
        seen.add(world.check(world.home, {world.old, world.new} if killed else {world.new}))
    assert seen == {world.old, world.new}, "the kills were to fall on both sides of the commit"


def test_killed_at_the_boundaries_of_a_collection(world):
    store = world.fresh(garbage=True)
    for point in share(ptrace.stops(store.collect), 0, 25):
        store = world.fresh(garbage=True)
        ptrace.kill_at(store.collect, point)
        world.check(world.home, {world.old})


def test_killed_at_the_boundaries_of_a_removal(world):
    """The name is there or gone, never half; a collection ends what was left, and the name can be
    given again."""
    first, seen = world.fresh(), set()
    for point in share(ptrace.stops(lambda: first.remove(world.ref)), 0, 25):
        store = world.fresh()
        ptrace.kill_at(lambda: store.remove(world.ref), point)  # noqa: B023 - called at once
        store.collect()
        store.collect()  # the first one still counts what lay aside as a name
        now = store.ref("translator", world.ref.scope)
        seen.add(now)
        assert now in (None, world.ref)
        left = sorted(
            p.name for f in ("refs", "objects", "tmp", "trash") for p in (world.home / f).iterdir()
        )
        assert left == ([] if now is None else sorted([f"{now.key}.json", now.digest]))
        assert store.publish(world.old_asset) == world.ref
    assert seen == {None, world.ref}, "the kills were to fall on both sides"


@pytest.mark.parametrize("code", ["EIO", "ENOSPC", "EDQUOT", "EROFS", "EACCES"])
def test_a_system_call_that_fails(world, code):
    """Every call in turn fails: it ends well or with one of our errors, and what was there before
    is intact."""
    store, number = world.fresh(), getattr(errno, code)
    run = [
        c
        for c in ptrace.calls(lambda: store.publish(world.new_asset))
        if isinstance(c, ptrace.Call)
    ]
    points = [
        i
        for i, call in enumerate(run)
        if call.name in (ptrace.CALLS.values() if code == "EIO" else CHANGING)
    ]
    unsynced = []
    for index in share(len(points), number, 10):
        store = world.fresh()
        *done, ended = ptrace.calls(
            partial(store.publish, world.new_asset), fail=(points[index], number)
        )
        assert ended in (0, 3), f"{code} at {run[points[index]]} ended with {ended}"
        now = world.check(world.home, {world.new} if ended == 0 else {world.old, world.new})
        failed = done[points[index]]
        assert isinstance(failed, ptrace.Call)
        if failed.name == "fsync" and now == world.new and ended == 0:
            unsynced.append(points[index])
    first_catalog = next(i for i, c in enumerate(run) if any("catalog" in p for p in c.paths))
    assert all(point > first_catalog for point in unsynced), (
        "success was reported though an fsync had failed"
    )


def test_power_loss_at_any_moment_of_a_publish(world, tmp_path):
    """Unsynced data dropped in many ways after every call; what was reported as published is
    there."""
    store = world.fresh()
    machine = Machine(world.home)
    run = [
        c
        for c in ptrace.calls(lambda: store.publish(world.new_asset))
        if isinstance(c, ptrace.Call)
    ]
    commit = max(i for i, c in enumerate(run) if c.name == "fsync" and not _of_catalog(run, i))
    chance, seen, to = random.Random(0), set(), world.folder / "after"
    for index, call in enumerate(run):
        machine.apply(call)
        if call.name not in CHANGING and index + 1 < len(run):
            continue
        for _ in range(12 if ALL else 2):
            shutil.rmtree(to, ignore_errors=True)
            machine.crash(chance, to)
            seen.add(world.check(to, {world.new} if index >= commit else {world.old, world.new}))
    assert seen == {world.old, world.new}


def test_power_loss_at_any_moment_of_a_collection(world):
    store = world.fresh(garbage=True)
    machine = Machine(world.home)
    chance, to = random.Random(0), world.folder / "after"
    for call in ptrace.calls(store.collect):
        if isinstance(call, ptrace.Call) and call.name != "exit":
            machine.apply(call)
            if call.name in CHANGING | {"unlinkat"}:
                for _ in range(12 if ALL else 1):
                    shutil.rmtree(to, ignore_errors=True)
                    machine.crash(chance, to)
                    world.check(to, {world.old})
                    LocalStore(to).publish(world.new_asset)
                    world.check(to, {world.new})


def test_the_power_loss_model_finds_a_missing_fsync(world, monkeypatch):
    """The model is only worth something if it fails on a store that does not sync."""
    monkeypatch.setattr("os.fsync", lambda handle: None)
    store = world.fresh()
    machine = Machine(world.home)
    for call in ptrace.calls(lambda: store.publish(world.new_asset)):
        if isinstance(call, ptrace.Call):
            machine.apply(call)
    chance, to, lost = random.Random(0), world.folder / "after", 0
    for _ in range(20):
        shutil.rmtree(to, ignore_errors=True)
        machine.crash(chance, to)
        try:
            world.check(to, {world.new})
        except Exception:  # noqa: BLE001 - any of them is the loss that is looked for
            lost += 1
    assert lost > 5


def _of_catalog(run: list[ptrace.Call], index: int) -> bool:
    """Whether the file that call `index` syncs was opened as part of the catalog."""
    handle = run[index].args[0]
    opened = [c for c in run[:index] if c.name == "openat" and c.result == handle]
    return "catalog" in opened[-1].paths[0]
