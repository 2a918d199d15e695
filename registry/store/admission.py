"""What may enter the store: bounded before anything is allocated, read once, hashed and checked as
it streams."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvbridge.asset.manifest import Controls, Manifest
from kvbridge.codec import parse_json
from kvbridge.errors import CorruptFile, Refused
from kvbridge.files import parse_sums
from kvbridge.format import (
    FLOAT_DTYPES,
    FOLDERS,
    MAX_ASSET_TENSORS,
    MAX_CARD_BYTES,
    MAX_JSON_BYTES,
    MAX_SUMS_BYTES,
    SUMS,
)
from kvbridge.geometry import digest_json
from kvbridge.headers import Header, expect_binding, read_safetensors_header
from kvbridge.registry.store.kinds import kind_of
from kvbridge.registry.store.records import Record, record_of
from kvbridge.registry.store.stream import Writer, copy_checked


@dataclass(frozen=True)
class AdmissionPolicy:
    """What a store admits. `public_keys` are PEM files that a signature is checked against."""

    max_weights_bytes: int = 64 << 30
    max_tensors: int = MAX_ASSET_TENSORS
    require_signature: bool = False
    public_keys: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Admitted:
    """An object that passed: its record and, for a translator, its manifest."""

    record: Record
    manifest: Manifest | None


Sink = Callable[[str], Writer]
ByteProgress = Callable[[int, int], None]


def admit(
    files: Mapping[str, Path],
    name: str,
    policy: AdmissionPolicy,
    *,
    bound_to: tuple[str, Manifest] | None = None,
    sink: Sink = lambda _: Writer(),
    progress: ByteProgress = lambda done, total: None,
) -> Admitted:
    """Checks an object given as file name → path and feeds its bytes to `sink`; `name` is for
    messages.

    Every file is opened once, links and special files are refused, and what is hashed and checked
    is what the sink gets. `bound_to` is digest and manifest of the translator that a control set or
    calibration must fit. Raises CorruptFile, UnknownSchema or Refused; the sink's writers are then
    closed or not, and worthless.
    """
    kind = kind_of(frozenset(files))
    spec = FOLDERS[kind]
    if SUMS not in files:
        raise CorruptFile(f"{name}: {SUMS} is missing")
    limits = {SUMS: MAX_SUMS_BYTES, spec.description: MAX_JSON_BYTES}
    if spec.tensors:
        limits[spec.tensors] = policy.max_weights_bytes
    with ExitStack() as stack:
        opened = {
            n: _open(files[n], f"{name}/{n}", limits.get(n, MAX_CARD_BYTES), stack)
            for n in sorted(files)
        }
        total = sum(size for _, size in opened.values())
        small = {n: _whole(*opened[n], f"{name}/{n}") for n in opened if n != spec.tensors}
        sums = parse_sums(small[SUMS], f"{name}/{SUMS}")
        if set(sums) != set(files) - {SUMS}:
            raise CorruptFile(f"{name}: holds other files than {SUMS} lists")
        for n, data in small.items():
            if n != SUMS:
                _same(hashlib.sha256(data).hexdigest(), sums[n], f"{name}/{n}")
        digest = hashlib.sha256(small[SUMS]).hexdigest()
        body = parse_json(small[spec.description], f"{name}/{spec.description}")
        record, manifest = record_of(kind, digest, total, body, f"{name}/{spec.description}")
        for n, data in small.items():
            writer = sink(n)
            writer.write(data)
            writer.close()
        done = sum(len(data) for data in small.values())
        if spec.tensors in opened:
            file, size = opened[spec.tensors]
            where = f"{name}/{spec.tensors}"
            header = read_safetensors_header(file, size, where, max_tensors=policy.max_tensors)
            _check_weights(header, size, kind, body, manifest, bound_to, where)
            weights_digest = copy_checked(
                file, size, header, sink(spec.tensors), where, lambda n: progress(done + n, total)
            )
            _same(weights_digest, sums[spec.tensors], where)
        progress(total, total)
    return Admitted(record, manifest)


def _check_weights(
    header: Header,
    size_bytes: int,
    kind: str,
    body: object,
    manifest: Manifest | None,
    bound_to: tuple[str, Manifest] | None,
    name: str,
) -> None:
    """Raises CorruptFile unless the header holds what the description says, and names it."""
    if manifest is not None:
        if size_bytes != manifest.weights_bytes:
            raise CorruptFile(
                f"{name}: {size_bytes} bytes, the manifest says {manifest.weights_bytes}"
            )
        manifest.admit(header, name)
    elif kind == "controls" and bound_to is not None:
        digest, asset = bound_to
        Controls.from_json(body, digest, asset, name).admit(header, name)
    elif kind == "calibration":
        _check_calibration(header, body, bound_to, name)
        expect_binding(header, digest_json(body), "this manifest", name)


def _check_calibration(
    header: Header, body: Any, bound_to: tuple[str, Manifest] | None, name: str
) -> None:
    """Raises CorruptFile for tensors that are no floating-point ones and for a gate of other
    models. What its statistics mean is for the gate to check when it loads them."""
    if odd := sorted({dtype for dtype, _, _ in header.tensors.values()} - set(FLOAT_DTYPES)):
        raise CorruptFile(f"{name}: expected floating-point tensors, found {', '.join(odd)}")
    if bound_to is None:
        return
    models = (bound_to[1].sender.digest, bound_to[1].receiver.digest)
    if (body.get("sender"), body.get("receiver")) != models:
        raise CorruptFile(
            f"{name}: calibrated on other models than its translator's; calibrate again"
        )


def _open(path: Path, name: str, most: int, stack: ExitStack) -> tuple[BinaryIO, int]:
    if path.is_symlink():
        raise CorruptFile(f"{name}: expected a regular file, found a link")
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        file = stack.enter_context(os.fdopen(handle, "rb", buffering=0))
        info = os.fstat(handle)
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{name}: expected a regular file: {error}") from error
    if not stat.S_ISREG(info.st_mode):
        raise CorruptFile(f"{name}: expected a regular file")
    if info.st_size > most:
        raise Refused(f"{name}: {info.st_size:,} bytes, more than the {most:,} allowed")
    return file, info.st_size


def _whole(file: BinaryIO, size: int, name: str) -> bytes:
    data = file.read(size + 1)
    if len(data) != size:
        raise CorruptFile(
            f"{name}: {len(data)} bytes, expected {size}; it changed while it was read"
        )
    return data


def _same(digest: str, expected: str, name: str) -> None:
    if digest != expected:
        raise CorruptFile(
            f"{name}: SHA-256 is {digest}, expected {expected}; fetch or fit it again"
        )
