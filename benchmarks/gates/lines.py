"""The lines that `collect` recorded, as the items of a label."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gates.pool import COLLECTED, PLAN, receiver_geometry
from kvbridge.errors import DataError
from kvbridge.gates.calibrate.config import GateConfig
from kvbridge.gates.calibrate.items import Attempt, GatedItem
from kvbridge.gates.labels import LABELS
from kvbridge.gates.labels.outcomes import Outcome
from kvbridge.gates.signals import DEFAULT_SIGNALS, SIGNALS, parts_of
from kvbridge.geometry import KVGeometry

SENDER_SIDE = ("sender_first", "sender_early", "sender_tail", "tail_loss", "sender_next")
COLUMNS = frozenset(c for s in SIGNALS.values() for c in s.columns)


@dataclass(frozen=True, eq=False)
class Pool:
    """Lines by case: `right` the pool itself. `receiver`: the geometry that costs are counted
    with."""

    cases: dict[str, list[dict[str, Any]]]
    receiver: KVGeometry

    @classmethod
    def read(cls, folder: Path) -> Pool:
        """Every line of both files; a torn last one is left out. Raises DataError where there is
        none, or where they were collected with other signals than there are."""
        cases: dict[str, list[dict[str, Any]]] = {}
        for name in COLLECTED:
            for row in _rows(folder / name):
                cases.setdefault(row["case"], []).append(row)
        if "right" not in cases:
            raise DataError(f"{folder}: expected the lines of `collect`, found none; collect first")
        first = next((row["signals"] for row in cases["right"] if "signals" in row), None)
        if first is not None and (odd := COLUMNS ^ first.keys()):
            raise DataError(
                f"{folder}: expected lines with today's signals, found others "
                f"({', '.join(sorted(odd))}); collect again"
            )
        return cls(cases, receiver_geometry(folder))

    @property
    def kinds(self) -> list[str]:
        """Kinds of text, the most frequent first."""
        counts = Counter(row["kind"] for row in self.cases["right"])
        return [kind for kind, _ in counts.most_common()]

    def items(
        self, label: str, tau: float | None, kinds: Sequence[str] | None = None
    ) -> list[GatedItem]:
        """The pool's requests under one label; they cost what the default signals do."""
        items = []
        for row in self.cases["right"]:
            if "signals" not in row or not (kinds is None or row["kind"] in kinds):
                continue
            damaged = damage(row, label, tau)
            if damaged is not None:
                attempt = Attempt(row["signals"], damaged, row["handoff_flops"] + gate_flops(row))
                items.append(GatedItem(row["id"], row["document"], row["tokens"], (attempt,)))
        return items

    def quantile(self, name: str, share: float, kind: str | None = None) -> float | None:
        """What `share` of the requests (of one kind) lie below in an outcome's number, two digits;
        None without any."""
        rows = [r for r in self.cases["right"] if r.get("outcome") and kind in (None, r["kind"])]
        values = [row["outcome"][name] for row in rows if row["outcome"][name] is not None]
        return float(f"{np.quantile(values, share):.2g}") if values else None


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Every row of a file, if it is there; a torn last line is left out."""
    if path.exists():
        for line in path.read_bytes().rpartition(b"\n")[0].splitlines():
            yield from json.loads(line)["rows"]


def gate_flops(row: dict[str, Any], signals: Sequence[str] = DEFAULT_SIGNALS) -> int:
    """What these signals cost of one line; all were read, and what several share is counted
    once."""
    parts = parts_of(signals)
    return sum(flops for part, flops in row["gate_flops"].items() if part in parts)


def damage(row: dict[str, Any], label: str, tau: float | None) -> bool | None:
    """What the label says of one line."""
    return LABELS[label].damaged(Outcome(**row["outcome"]), LABELS[label].limit(tau))


def documents_split(
    items: Sequence[GatedItem], share: float, seed: int
) -> tuple[list[GatedItem], list[GatedItem]]:
    """(items of a random `share` of documents, the others)."""
    names = sorted({item.document for item in items})
    chosen = set(np.random.default_rng(seed).permutation(names)[: round(share * len(names))])
    inside = [item for item in items if item.document in chosen]
    outside = [item for item in items if item.document not in chosen]
    return inside, outside


def config_of(label: str, signals: Sequence[str] = DEFAULT_SIGNALS) -> GateConfig:
    """One rung, the default signals."""
    return GateConfig(label=label, plans=(PLAN,), signals=tuple(signals))
