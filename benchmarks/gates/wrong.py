"""Which wrong caches pass the limits, and which column tells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.gates.lines import SENDER_SIDE, Pool, config_of, documents_split
from kvbridge.gates.calibrate.evaluate import auroc
from kvbridge.gates.calibrate.items import GatedItem
from kvbridge.gates.calibrate.levels import fit_rungs
from kvbridge.gates.decide.guarantee import upper_bound
from kvbridge.gates.signals import DEFAULT_SIGNALS, SIGNALS

SETS = {
    "default signals": DEFAULT_SIGNALS,
    "all signals": tuple(SIGNALS),
    "without the sender model": tuple(s for s in DEFAULT_SIGNALS if s not in SENDER_SIDE),
    "tail residual alone": ("tail_residual", "length"),
    "first layers alone": ("first_layers", "length"),
    "leverage alone": ("leverage", "length"),
}
"""Sets of signals whose limits are tried."""


def wrong_caches(pool: Pool) -> dict[str, Any]:
    """How many wrong caches pass the limits alone, set on a third of the documents; and what the
    limits cost."""
    learn, rest = documents_split(pool.items("next_token", None), 1 / 3, 5)
    held_out = {item.document for item in rest}
    return {name: _past_limits(pool, learn, rest, held_out, s) for name, s in SETS.items()}


def _past_limits(
    pool: Pool,
    learn: list[GatedItem],
    rest: list[GatedItem],
    held_out: set[str],
    signals: tuple[str, ...],
) -> dict[str, Any]:
    used, rungs, _ = fit_rungs(learn, config_of("next_token", signals))
    limits = rungs[0].limits
    extra = [_refused(item.attempts[0].columns or {}, limits) for item in rest]
    cases = {}
    for case, rows in pool.cases.items():
        if case not in ("right", "rung"):
            cases[case] = _passed([r for r in rows if r["document"] in held_out], limits)
    return {
        "signals": list(used),
        "extra_refusals": float(np.mean(extra)),
        "of": len(extra),
        "cases": cases,
        "every_wrong_document": _passed(pool.cases.get("wrong_document", []), limits),
    }


def _passed(rows: list[dict[str, Any]], limits: Mapping[str, float]) -> dict[str, Any]:
    """How many of the rows that reached the gate exceed no limit, and what their share is at most,
    with 95 % confidence."""
    read = [row["signals"] for row in rows if "signals" in row]
    passed = sum(not _refused(columns, limits) for columns in read)
    bound = upper_bound(passed, len(read), 0.05) if read else None
    return {"n": len(read), "passed": passed, "bound_95": bound}


def _refused(columns: Mapping[str, float], limits: Mapping[str, float]) -> bool:
    """Whether any limit is exceeded; NaN exceeds every limit."""
    return any(not columns[c] <= limit for c, limit in limits.items())


def columns_on_wrong(pool: Pool) -> dict[str, float | None]:
    """AUROC of every column for wrong against right documents."""
    right = [r["signals"] for r in pool.cases["right"] if "signals" in r]
    wrong = [r["signals"] for r in pool.cases.get("wrong_document", []) if "signals" in r]
    bad = [False] * len(right) + [True] * len(wrong)
    names = [column for signal in SIGNALS.values() for column in signal.columns]
    return {name: auroc([row[name] for row in (*right, *wrong)], bad) for name in names}
