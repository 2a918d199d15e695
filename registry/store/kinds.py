"""What kinds of objects a store holds, told apart by the names of their files."""

from __future__ import annotations

from pathlib import Path

from kvbridge.errors import CorruptFile, Refused
from kvbridge.format import FOLDERS, SUMS, TRANSLATOR


def kind_of(names: frozenset[str]) -> str:
    """Which kind of object holds exactly these files; raises Refused."""
    for kind, spec in FOLDERS.items():
        if names - {SUMS} == spec.required:
            return kind
    listed = ", ".join(repr(n)[:60] for n in sorted(names)[:6]) or "none"
    raise Refused(
        f"expected the files of a translator ({', '.join(sorted(TRANSLATOR.required))}, {SUMS}), "
        f"a control set, a calibration or a signature; found {listed}"
    )


def folder_files(folder: Path) -> dict[str, Path]:
    """Name → path of everything in a folder; raises CorruptFile where it is none."""
    try:
        return {entry.name: entry for entry in folder.iterdir()}
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{folder}: expected the folder of an asset: {error}") from error
