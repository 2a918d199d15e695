"""The lines that `kvbridge.eval.gate_pool` collected, as the items of a label."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvbridge.errors import DataError
from kvbridge.eval.gate_pool import PARTS, PLAN, receiver_geometry
from kvbridge.gates.config import GateConfig
from kvbridge.gates.items import Attempt, Item
from kvbridge.gates.labels import LABELS
from kvbridge.gates.outcomes import Outcome
from kvbridge.gates.signals import SIGNALS
from kvbridge.geometry import KVGeometry

SENDER_SIDE = ("sender_first", "sender_tail", "tail_loss", "sender_next")


@dataclass(frozen=True, eq=False)
class Pool:
    """Lines by case: `right` the pool itself. `receiver`: the geometry that costs are counted with."""

    cases: dict[str, list[dict[str, Any]]]
    receiver: KVGeometry

    @classmethod
    def read(cls, folder: Path) -> Pool:
        """Every line of both files; a torn last one is left out. Raises DataError where there is none."""
        cases: dict[str, list[dict[str, Any]]] = {}
        for path in (folder / name for name in PARTS if (folder / name).exists()):
            for line in path.read_bytes().rpartition(b"\n")[0].splitlines():
                for row in json.loads(line)["rows"]:
                    cases.setdefault(row["case"], []).append(row)
        if "right" not in cases:
            raise DataError(f"{folder}: expected lines of kvbridge.eval.gate_pool, found none; collect first")
        return cls(cases, receiver_geometry(folder))

    @property
    def kinds(self) -> list[str]:
        """Kinds of text, the most frequent first."""
        return [kind for kind, _ in Counter(row["kind"] for row in self.cases["right"]).most_common()]

    def items(self, label: str, tau: float | None, kinds: Sequence[str] | None = None) -> list[Item]:
        """The pool's requests under one label."""
        found = []
        for row in self.cases["right"]:
            if (kinds is None or row["kind"] in kinds) and "signals" in row:
                damaged = damage(row, label, tau)
                if damaged is not None:
                    cost = row["handoff_flops"] + sum(row["gate_flops"].values())
                    found.append(Item(row["id"], row["document"], row["tokens"], (Attempt(row["signals"], damaged, cost),)))  # fmt: skip
        return found

    def quantile(self, name: str, share: float, kind: str | None = None) -> float | None:
        """What `share` of the requests (of one kind) lie below in an outcome's number, two digits; None without any."""
        rows = [r for r in self.cases["right"] if r.get("outcome") and kind in (None, r["kind"])]
        found = [r["outcome"][name] for r in rows if r["outcome"][name] is not None]
        return float(f"{np.quantile(found, share):.2g}") if found else None


def damage(row: dict[str, Any], label: str, tau: float | None) -> bool | None:
    """What the label says of one line."""
    limit = tau if tau is not None else LABELS[label].default or 0.0
    return LABELS[label].damaged(Outcome(**row["outcome"]), limit)


def documents_split(items: Sequence[Item], share: float, seed: int) -> tuple[list[Item], list[Item]]:
    """(items of a random `share` of documents, the others)."""
    names = sorted({i.document for i in items})
    chosen = set(np.random.default_rng(seed).permutation(names)[: round(share * len(names))])
    return [i for i in items if i.document in chosen], [i for i in items if i.document not in chosen]


def config_of(label: str, signals: Sequence[str] = tuple(SIGNALS)) -> GateConfig:
    """One rung, all signals."""
    return GateConfig(label=label, plans=(PLAN,), signals=tuple(signals))
