"""What kinds of objects a store holds, told apart by the names of their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvbridge.errors import CorruptFile, Refused
from kvbridge.files import SUMS


@dataclass(frozen=True)
class Kind:
    """The files of a kind of object: the one that describes it, its weights, and others."""

    description: str
    weights: str | None = None
    others: tuple[str, ...] = ()

    @property
    def required(self) -> frozenset[str]:
        """Their names; SHA256SUMS comes with them."""
        return frozenset(
            (self.description, *((self.weights,) if self.weights else ()), *self.others)
        )


KINDS = {
    "translator": Kind("manifest.json", "weights.safetensors", ("README.md",)),
    "controls": Kind("manifest.json", "controls.safetensors"),
    "calibration": Kind("calibration.json", "gate.safetensors"),
    "signature": Kind("statement.json", None, ("model.sig",)),
}


def kind_of(names: frozenset[str]) -> str:
    """Which kind of object holds exactly these files; raises Refused."""
    for kind, spec in KINDS.items():
        if names - {SUMS} == spec.required:
            return kind
    raise Refused(
        f"expected the files of a translator ({', '.join(sorted(KINDS['translator'].required))}, {SUMS}), "
        f"a control set, a calibration or a signature; found {', '.join(repr(n)[:60] for n in sorted(names)[:6]) or 'none'}"
    )


def folder_files(folder: Path) -> dict[str, Path]:
    """Name → path of everything in a folder; raises CorruptFile where it is none."""
    try:
        return {entry.name: entry for entry in folder.iterdir()}
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{folder}: expected the folder of an asset: {error}") from error
