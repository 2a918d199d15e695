"""Real file systems that are full, read-only or not ours. Mounting needs root; skipped with a
message elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager

import numpy as np
import pytest

from kvbridge.errors import StoreError
from kvbridge.registry.store import LocalStore
from tests.registry import assets


@contextmanager
def mounted(path, options):
    path.mkdir(exist_ok=True)
    mount = shutil.which("mount")
    done = (
        None
        if mount is None
        else subprocess.run(
            [mount, "-t", "tmpfs", "-o", options, "kvbridge-test", path], capture_output=True
        )
    )
    if done is None or done.returncode:
        pytest.skip("mounting a tmpfs is refused here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk(tmp_path, asset):
    """Fill the disk byte by byte around what a publish needs: it says so, and what was there stays
    whole."""
    large = assets.build(
        tmp_path / "large",
        assets.geometry("a/s", width=64),
        assets.geometry("a/r", width=64),
        dtype=np.float64,
    )
    with mounted(tmp_path / "small", "size=700k") as disk:
        store = LocalStore(disk / "home")
        ref = store.publish(asset)
        with pytest.raises(StoreError, match="disk is full"):
            store.publish(large)
        store.verify(ref.digest)
        assert [e.ref.digest for e in store.entries()] == [ref.digest]
        assert store.collect().stages == ()
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        other = assets.build(tmp_path / "other", seed=5)
        for left in range(0, 40_960, 4096):
            (disk / "ballast").write_bytes(bytes(free - left))
            try:
                assert store.publish(other, tag="other")
            except StoreError as error:
                assert "full" in str(error)  # noqa: PT017 - the loop ends with one that fits
            store.verify(ref.digest)
            (disk / "ballast").unlink()
        assert {e.problem for e in store.entries()} == {None}
        assert len(store.entries()) == 2


def test_a_read_only_disk_is_listed_and_read(tmp_path, asset, newer):
    with mounted(tmp_path / "disk", "size=4m") as disk:
        LocalStore(disk / "home").publish(newer)
        ref = LocalStore(disk / "home").publish(asset)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        store = LocalStore(disk / "home")
        assert [e.ref.digest for e in store.entries()] == [ref.digest]
        assert store.find(assets.geometry("org/sender"), assets.geometry("org/receiver", width=6))
        store.verify(ref.digest)
        for change in (lambda: store.publish(newer), store.collect, lambda: store.remove(ref)):
            with pytest.raises(StoreError, match="read-only"):
                change()


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_store_of_another_user(tmp_path, asset, newer):
    """In a child that gives up root, where the tests have it."""
    store = LocalStore(tmp_path / "home")
    store.publish(newer)
    ref = store.publish(asset)
    for path in (tmp_path, *tmp_path.parents):
        if os.stat(path).st_uid == os.getuid() and path != tmp_path.anchor:
            os.chmod(path, os.stat(path).st_mode | 0o055)
    for folder in (store.home, *(p for p in store.home.iterdir() if p.is_dir())):
        os.chmod(folder, 0o555)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            assert [e.ref.digest for e in store.entries()] == [ref.digest]
            store.verify(ref.digest)
            with pytest.raises(StoreError, match="not writable"):
                store.publish(newer)
            with pytest.raises(StoreError, match="not writable"):
                store.collect()
            code = 0
        except BaseException as error:  # noqa: BLE001 - reported by the exit code
            print(repr(error), flush=True)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for folder in (store.home, *(p for p in store.home.iterdir() if p.is_dir())):
        os.chmod(folder, 0o755)
    store.verify(ref.digest)


def test_a_file_where_a_folder_should_be(tmp_path, asset):
    (tmp_path / "home").write_text("")
    with pytest.raises(StoreError, match="failed"):
        LocalStore(tmp_path / "home").publish(asset)
