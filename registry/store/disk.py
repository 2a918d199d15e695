"""The store's folders and the few moves in them: every one is atomic, and durable where it must be.
No locks needed.

objects/<digest>/          published objects; a folder here is whole, and is never written to again
refs/<key>.json            which object a (pair, tag) names; replaced by rename
tmp/<token>/               one writer's work in progress
trash/<name>.<token>/      on its way out; still restorable until it is renamed to `dead.<token>`
quarantine/<digest>.<token>/   what failed its digest, with the reason beside it
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from kvbridge.errors import StoreError
from kvbridge.files import sync_folder
from kvbridge.registry.store.stream import Writer

START_BYTES = 16 << 20
"""After so many bytes of a file the kernel is asked to start writing them."""
_HINTS = {
    errno.ENOSPC: "the disk is full; free some space or run `kvbridge registry gc`",
    errno.EDQUOT: "the disk quota is used up; free some space or run `kvbridge registry gc`",
    errno.EROFS: "the store is on a read-only file system; set KVBRIDGE_HOME to another folder",
    errno.EACCES: "the store is not writable for this user; set KVBRIDGE_HOME to another folder",
    errno.EPERM: "the store is not writable for this user; set KVBRIDGE_HOME to another folder",
    errno.EIO: "the disk failed; check it before trying again",
}


@contextlib.contextmanager
def disk_errors(action: str) -> Iterator[None]:
    """Turns an OSError of the block into a StoreError that names the action and the next step."""
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(
            error.errno or 0, "nothing that was published before has changed; try again"
        )
        raise StoreError(f"{action} failed: {error.strerror or error}; {hint}") from error


class Disk:
    """The folders of one store."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.objects, self.refs, self.tmp = home / "objects", home / "refs", home / "tmp"
        self.trash, self.quarantine = home / "trash", home / "quarantine"

    def create(self) -> None:
        """Makes the folders that are missing, durably."""
        if not self.home.is_dir():
            self.home.mkdir(parents=True, exist_ok=True)
            sync_folder(self.home.parent)
        folders = (self.objects, self.refs, self.tmp, self.trash, self.quarantine)
        if not all(folder.is_dir() for folder in folders):
            for folder in folders:
                folder.mkdir(exist_ok=True)
            sync_folder(self.home)

    @contextlib.contextmanager
    def stage(self) -> Iterator[Path]:
        """A fresh folder of this writer alone, removed afterwards.

        The advisory lock on it only spares it from a collection that runs meanwhile: without it the
        writer finds its folder gone and fails, nothing else.
        """
        path, handle = self._fresh()
        try:
            yield path
        finally:
            os.close(handle)
            with contextlib.suppress(OSError):
                remove_tree(path)

    def _fresh(self) -> tuple[Path, int]:
        """A new folder of `tmp/` and the handle that holds its lock.

        Between making and locking a folder, a collection may take it for an abandoned one: it is
        looked for once more under the lock, and another one is made where it is gone.
        """
        for _ in range(8):
            path = self.tmp / secrets.token_hex(16)
            path.mkdir()
            with contextlib.suppress(FileNotFoundError):
                handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                # File systems without locks say so here; a collection then takes more than it must.
                with contextlib.suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_EX)
                if path.is_dir():
                    return path, handle
                os.close(handle)
        raise StoreError("a collection kept taking this writer's folder; stop it and try again")

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One writer after another, as far as locks do anything."""
        handle = os.open(self.home / "turn.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def install(self, staged: Path, digest: str) -> bool:
        """Moves a synced folder into place, durably; False where an object of that digest stands
        already."""
        try:
            os.rename(staged, self.objects / digest)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) or (self.objects / digest).is_dir():
                return False
            raise
        sync_folder(self.objects)
        return True

    def discard(self, digest: str) -> None:
        """Moves an object to the trash, from where `restore` brings it back."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.objects / digest, self.trash / f"{digest}.{secrets.token_hex(8)}")

    def restore(self, digest: str) -> bool:
        """Brings an object back from the trash if it is there; True where it stands in its place
        afterwards."""
        for entry in self.trash.glob(f"{digest}.*"):
            with contextlib.suppress(FileNotFoundError):
                if self.install(entry, digest):
                    return True
        return (self.objects / digest).is_dir()

    def bury(self, entry: Path) -> None:
        """Deletes one entry of the trash; renamed first, so that it cannot be restored half
        deleted."""
        dead = self.trash / f"dead.{secrets.token_hex(8)}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(entry, dead)
            remove_tree(dead)

    def set_aside(self, digest: str, reason: str, sound: Callable[[Path], bool]) -> Path | None:
        """Moves an object that failed its digest to the quarantine.

        None where it is gone, or where the one that stands there now is `sound` and so came since:
        that one stays.
        """
        target = self.quarantine / f"{digest}.{secrets.token_hex(8)}"
        try:
            os.rename(self.objects / digest, target)
        except FileNotFoundError:
            return None
        if sound(target):
            # It was replaced between the reading that failed and the move: back with it.
            if not self.install(target, digest):
                remove_tree(target)
            return None
        target.with_name(target.name + ".txt").write_text(reason + "\n", "utf-8")
        sync_folder(self.objects)
        sync_folder(self.quarantine)
        return target

    def abandoned(self) -> list[Path]:
        """Stages whose writer is gone. A live writer holds a lock on its own; where locks do
        nothing, all count."""
        stages = []
        for path in sorted(self.tmp.iterdir()):
            with _claim(path) as free:
                if free:
                    stages.append(path)
        return stages

    def clear(self, stage: str) -> bool:
        """Moves a stage to the trash unless its writer lives; True where it is moved.

        The lock is held until the stage is gone: a writer that waits for it sees that and takes
        another folder.
        """
        with _claim(self.tmp / stage) as free:
            if free:
                try:
                    os.rename(self.tmp / stage, self.trash / f"stage.{secrets.token_hex(8)}")
                except FileNotFoundError:
                    return False
            return free


@contextlib.contextmanager
def _claim(stage: Path) -> Iterator[bool]:
    """Holds a stage's lock for the block; False where its writer has it, or where the stage is
    gone."""
    try:
        handle = os.open(stage, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        free = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:
            pass
        yield free and stage.exists()
    finally:
        os.close(handle)


def remove_tree(path: Path) -> None:
    """Removes one of the store's folders if it is there; follows no links."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def tree_bytes(path: Path) -> int:
    """Bytes of the files below `path`; what vanishes meanwhile counts nothing."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


class FileWriter(Writer):
    """Writes a new file; the kernel starts on it early, and `close` returns when it is durable."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._open, self._done, self._started = True, 0, 0

    def write(self, data: bytes) -> None:
        """Writes the next bytes."""
        _write_all(self._handle, data)
        self._done += len(data)
        waiting = self._done - self._started
        if waiting >= START_BYTES and hasattr(os, "posix_fadvise"):
            # Asked to drop pages that are still dirty, the kernel starts writing them, while the
            # next bytes are hashed: the sync at the end then has little left to wait for.
            os.posix_fadvise(self._handle, self._started, waiting, os.POSIX_FADV_DONTNEED)
            self._started = self._done

    def close(self) -> None:
        """Syncs the file."""
        try:
            os.fsync(self._handle)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes without syncing; the file is worthless unless `close` was called before."""
        if self._open:
            self._open = False
            os.close(self._handle)


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(handle, view) :]
