"""What the gate is worth on a pair, from the lines that `collect` recorded; no model runs here.

Every draw has a fixed seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gates.carried import carried
from benchmarks.gates.ladder import ladder
from benchmarks.gates.lines import Pool, gate_flops
from benchmarks.gates.recalibrate import recalibrations
from benchmarks.gates.separation import separation
from benchmarks.gates.wrong import columns_on_wrong, wrong_caches
from kvbridge.cli.output import say
from kvbridge.gates.calibrate.evaluate import net_saving
from kvbridge.gates.signals import SIGNALS
from kvbridge.handoff.cost import prefill_flops

Case = tuple[str, float | None, str | None]
"""A label, its limit, and the kind of text (None: all)."""
EVERYWHERE: tuple[Case, ...] = (
    ("next_token", None, None),
    ("continuation", 4.0, None),
    ("kl", 0.1, None),
    ("loss_gap", 0.1, None),
    ("lost_answer", None, None),
)
AT_HOME = (
    ("next_token", None),
    ("continuation", 4.0),
    ("kl", 0.1),
    ("kl", 0.02),
    ("loss_gap", 0.1),
)
LIMITED = (("kl", "kl"), ("loss_gap", "gap"))
"""Labels with a limit, and the outcome's number that it is on."""


def cases_of(pool: Pool) -> list[Case]:
    """Labels on everything, on the most frequent kind where there are several; and, where a limit
    of KL or loss gap calls hardly any or most requests of this pair damaged, what 70 % and 85 % of
    them stay below."""
    cases = list(EVERYWHERE)
    for label, name in LIMITED:
        damaged = [item.attempts[0].damaged for item in pool.items(label, 0.1)]
        if not damaged or 0.05 < float(np.mean(damaged)) < 0.4:
            continue
        for share in (0.7, 0.85):
            limit = pool.quantile(name, share)
            if limit is not None and limit > 0:
                cases.append((label, limit, None))
    if len(pool.kinds) > 1:
        cases += [(label, tau, pool.kinds[0]) for label, tau in AT_HOME]
    return list(dict.fromkeys(cases))


def name_of(case: Case) -> str:
    """A case in words."""
    label, tau, kind = case
    name = label
    if tau is not None:
        name = f"continuation of {tau:g}" if label == "continuation" else f"{label} > {tau:g}"
    return name + (f", {kind}" if kind else "")


def savings(pool: Pool) -> dict[str, float]:
    """Mean shares of a prefill: handoff, the default signals, and all signals."""
    rows = [row for row in pool.cases["right"] if "signals" in row]
    flops = {
        "handoff": [row["handoff_flops"] for row in rows],
        "gate": [gate_flops(row) for row in rows],
        "gate_of_all": [gate_flops(row, tuple(SIGNALS)) for row in rows],
    }
    dense = np.array([prefill_flops(pool.receiver, row["tokens"]) for row in rows], dtype=float)
    return {name: float((np.array(values) / dense).mean()) for name, values in flops.items()}


def study(folder: Path) -> dict[str, Any]:
    """All of it, as it is written to study.json."""
    pool = Pool.read(folder)
    right = pool.cases["right"]
    lengths = [row["tokens"] for row in right if "tokens" in row]
    shares = savings(pool)
    body: dict[str, Any] = {
        "requests": len(right),
        "documents": len({row["document"] for row in right}),
        "tokens": [int(tokens) for tokens in np.quantile(lengths, (0, 0.1, 0.5, 0.9, 1))],
        "contract_refused": sum("refused" in row for row in right),
        "shares": shares,
        "labels": {},
        "wrong_columns": columns_on_wrong(pool),
        "wrong": wrong_caches(pool),
    }
    for case in cases_of(pool):
        name = name_of(case)
        body["labels"][name] = _of_case(pool, case, shares)
        say(f"{name}: done")
    body["carried"] = {}
    for label, name in LIMITED:
        limit = pool.quantile(name, 0.85, pool.kinds[0])
        if limit is not None:
            body["carried"][f"{label} > {limit:g}"] = carried(pool, label, limit, 0.1, 0.05)
    body["ladder"] = {}
    for label, limit in (("next_token", None), ("kl", 0.1)):
        body["ladder"][name_of((label, limit, None))] = ladder(pool, label, limit)
    return body


def _of_case(pool: Pool, case: Case, shares: dict[str, float]) -> dict[str, Any]:
    """What holds for one label: how damage is told, and how a calibration keeps its promise."""
    label, tau, kind = case
    items = pool.items(label, tau, kind and (kind,))
    if not items:
        return {"n": 0, "damaged": None}
    runs = recalibrations(items, label)
    for level in runs.values():
        if isinstance(level, dict) and level["request"].get("n"):
            coverage = level["request"]["coverage"]
            level["net_saving"] = net_saving(
                coverage, prefill=1, handoff=shares["handoff"], gate=shares["gate"]
            )
    return {
        "n": len(items),
        "damaged": float(np.mean([item.attempts[0].damaged for item in items])),
        "separation": separation(items, label),
        "recalibrations": runs,
    }
