"""One pass over weights: what is hashed (in a thread of its own) and checked is what is written."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable
from typing import BinaryIO

from kvbridge.errors import CorruptFile
from kvbridge.headers import Header
from kvbridge.registry.store.finite import FiniteScan

CHUNK_BYTES = 4 << 20


class Writer:
    """Where admitted bytes go, in order; this one drops them."""

    def write(self, data: bytes) -> None:
        """Takes the next bytes."""

    def close(self) -> None:
        """All bytes were given: they are durable when this returns."""


def copy_checked(
    file: BinaryIO,
    size: int,
    header: Header,
    writer: Writer,
    name: str,
    report: Callable[[int], None],
) -> str:
    """Reads a safetensors file from its start into `writer` and returns its SHA-256; `report` gets
    the bytes done.

    The writer has closed the file when this returns. Raises CorruptFile for another size than
    `size` and for weights that are not finite.
    """
    file.seek(0)
    scan, done = FiniteScan(header), 0
    skip = size - max((stop for _, _, (_, stop) in header.tensors.values()), default=0)
    with Hasher() as hasher:
        while chunk := file.read(min(CHUNK_BYTES, size - done)):
            hasher.update(chunk)
            writer.write(chunk)
            scan.update(chunk[max(0, skip - done) :] if done < skip else chunk)
            done += len(chunk)
            report(done)
        writer.close()
    if done != size:
        raise CorruptFile(f"{name}: {done} bytes, expected {size}; it changed while it was read")
    if scan.bad is not None:
        raise CorruptFile(f"{name}: holds NaN or infinity")
    return hasher.digest


class Hasher:
    """SHA-256 of chunks, in a thread where there is more than one; at most three chunks wait.
    `digest` is set on exit."""

    def __init__(self) -> None:
        self._state = hashlib.sha256()
        self._queue: queue.Queue[bytes | None] = queue.Queue(maxsize=3)
        self._thread: threading.Thread | None = None
        self._first: bytes | None = None
        self.digest = ""

    def update(self, chunk: bytes) -> None:
        """Takes the next bytes."""
        if self._thread is None and self._first is None:
            self._first = chunk
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._queue.put(chunk)

    def __enter__(self) -> Hasher:
        return self

    def __exit__(self, *problem: object) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        elif self._first is not None:
            self._state.update(self._first)
        self.digest = self._state.hexdigest()

    def _run(self) -> None:
        self._state.update(self._first or b"")
        while (chunk := self._queue.get()) is not None:
            self._state.update(chunk)
