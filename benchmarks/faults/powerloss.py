"""What a disk may hold after power loss, given the system calls of a run.

Inodes and the entries that name them are apart. fsync of a file makes its bytes durable, not its
name; fsync of a folder makes the entries in it durable. Everything else may or may not have reached
the disk, in any combination: each unsynced change of an entry is kept or dropped, and of each
unsynced file an arbitrary part was written, as itself, as zeros or not at all. A rename is one
change: both of its folders see it or neither does, as every journalling file system promises.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults.ptrace import Call

O_CREAT, O_TRUNC = 0o100, 0o1000


@dataclass
class Inode:
    """A file (its bytes now, and those known to be on the disk) or a folder (its entries now)."""

    folder: bool
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    entries: dict[str, Inode] = field(default_factory=dict)
    stored: dict[str, Inode] = field(default_factory=dict)


@dataclass
class Change:
    """One atomic change of entries: (folder, name, inode or None for removal), and whether it is
    durable."""

    parts: list[tuple[Inode, str, Inode | None]]
    durable: bool = False


class Machine:
    """Replays calls below `root`, whose state at the start counts as durable; other paths are
    ignored."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, _load(root)
        self.changes: list[Change] = []
        self.handles: dict[int, list] = {}

    def apply(self, call: Call) -> None:
        """One call that returned."""
        result = -1 if call.result is None else call.result
        if result < 0:
            return
        verb = getattr(self, f"_{call.name}", None)
        if verb is not None:
            verb(call, result)

    def crash(self, chance: random.Random, to: Path) -> None:
        """Writes to `to` what the disk may hold if the power goes now."""
        keep = [c.durable or chance.random() < 0.5 for c in self.changes]
        stored: dict[int, dict[str, Inode]] = {}
        for change, kept in zip(self.changes, keep, strict=True):
            for folder, name, inode in change.parts if kept else ():
                entries = stored.setdefault(id(folder), dict(folder.stored))
                entries.pop(name, None)
                if inode is not None:
                    entries[name] = inode
        _write(self.top, to, stored, chance)

    def _find(self, path: str) -> tuple[Inode, str] | None:
        try:
            parts = Path(path).relative_to(self.root).parts
        except ValueError:
            return None
        node = self.top
        for part in parts[:-1]:
            node = node.entries[part]
        return node, parts[-1] if parts else "."

    def _get(self, path: str) -> Inode | None:
        place = self._find(path)
        return (
            None
            if place is None
            else self.top
            if place[1] == "."
            else place[0].entries.get(place[1])
        )

    def _change(self, *parts: tuple[Inode, str, Inode | None]) -> None:
        for folder, name, inode in parts:
            folder.entries.pop(name, None)
            if inode is not None:
                folder.entries[name] = inode
        self.changes.append(Change(list(parts)))

    def _openat(self, call: Call, result: int) -> None:
        place, flags = self._find(call.paths[0]), call.args[2]
        self.handles.pop(result, None)
        if place is None:
            return
        inode = self._get(call.paths[0])
        if inode is None:
            assert flags & O_CREAT, call
            inode = Inode(False)
            self._change((place[0], place[1], inode))
        if flags & O_TRUNC:
            inode.data.clear()
        self.handles[result] = [inode, 0]

    def _close(self, call: Call, result: int) -> None:
        self.handles.pop(call.args[0], None)

    def _write(self, call: Call, result: int) -> None:
        if handle := self.handles.get(call.args[0]):
            inode, at = handle
            inode.data[at : at + result] = call.data[:result]
            handle[1] += result

    def _pwrite64(self, call: Call, result: int) -> None:
        if handle := self.handles.get(call.args[0]):
            at = call.args[3]
            handle[0].data.extend(bytes(max(0, at - len(handle[0].data))))
            handle[0].data[at : at + result] = call.data[:result]

    def _ftruncate(self, call: Call, result: int) -> None:
        if handle := self.handles.get(call.args[0]):
            data, size = handle[0].data, call.args[1]
            data.extend(bytes(max(0, size - len(data))))
            del data[size:]

    def _fsync(self, call: Call, result: int) -> None:
        if handle := self.handles.get(call.args[0]):
            inode = handle[0]
            if not inode.folder:
                inode.durable = bytes(inode.data)
            for change in self.changes:
                change.durable |= any(folder is inode for folder, _, _ in change.parts)

    _fdatasync = _fsync

    def _mkdir(self, call: Call, result: int) -> None:
        if place := self._find(call.paths[0]):
            self._change((place[0], place[1], Inode(True)))

    def _unlink(self, call: Call, result: int) -> None:
        if place := self._find(call.paths[0]):
            self._change((place[0], place[1], None))

    _rmdir = _unlink

    def _unlinkat(self, call: Call, result: int) -> None:
        if os.path.isabs(call.paths[0]):
            self._unlink(call, result)
        elif handle := self.handles.get(call.args[0]):
            self._change((handle[0], call.paths[0], None))

    def _rename(self, call: Call, result: int) -> None:
        old, new = self._find(call.paths[0]), self._find(call.paths[1])
        if old is not None and new is not None:
            self._change((old[0], old[1], None), (new[0], new[1], old[0].entries[old[1]]))


def _load(path: Path) -> Inode:
    if path.is_dir():
        entries = {child.name: _load(child) for child in path.iterdir()}
        return Inode(True, entries=dict(entries), stored=entries)
    data = path.read_bytes()
    return Inode(False, bytearray(data), data)


def _write(
    inode: Inode, to: Path, stored: dict[int, dict[str, Inode]], chance: random.Random
) -> None:
    if inode.folder:
        to.mkdir()
        for name, child in stored.get(id(inode), inode.stored).items():
            _write(child, to / name, stored, chance)
        return
    data = bytes(inode.data)
    if data != inode.durable:
        cut = chance.randrange(len(data) + 1)
        data = chance.choice(
            (inode.durable, data, data[:cut], data[:cut] + bytes(len(data) - cut), b"")
        )
    to.write_bytes(data)
