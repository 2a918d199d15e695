"""Which wrong caches pass the limits, and which column tells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.gates.lines import SENDER_SIDE, Pool, config_of, documents_split
from kvbridge.gates.calibrate.evaluate import auroc
from kvbridge.gates.calibrate.levels import fit_rungs
from kvbridge.gates.decide.guarantee import upper_bound
from kvbridge.gates.signals import DEFAULT_SIGNALS, SIGNALS


def wrong_caches(pool: Pool) -> dict[str, Any]:
    """How many wrong caches pass the limits alone, set on a third of the documents; and what the limits cost."""
    items = pool.items("next_token", None)
    learn, rest = documents_split(items, 1 / 3, 5)
    held = {i.document for i in rest}
    found: dict[str, Any] = {}
    sets = {
        "default signals": DEFAULT_SIGNALS,
        "all signals": tuple(SIGNALS),
        "without the sender model": tuple(s for s in DEFAULT_SIGNALS if s not in SENDER_SIDE),
        "tail residual alone": ("tail_residual", "length"),
        "first layers alone": ("first_layers", "length"),
        "leverage alone": ("leverage", "length"),
    }
    for name, signals in sets.items():
        used, rungs, _ = fit_rungs(learn, config_of("next_token", signals))
        limits = rungs[0].limits
        extra = [_refused(item.attempts[0].columns or {}, limits) for item in rest]
        cases = {}
        for case, rows in pool.cases.items():
            if case not in ("right", "rung"):
                known = [r for r in rows if r["document"] in held and "signals" in r]
                passed = sum(not _refused(r["signals"], limits) for r in known)
                cases[case] = {
                    "n": len(known),
                    "passed": passed,
                    "bound_95": upper_bound(passed, len(known), 0.05) if known else None,
                }
        every = [r for r in pool.cases.get("wrong_document", []) if "signals" in r]
        k = sum(not _refused(r["signals"], limits) for r in every)
        found[name] = {
            "signals": list(used),
            "extra_refusals": float(np.mean(extra)),
            "of": len(extra),
            "cases": cases,
            "every_wrong_document": {
                "n": len(every),
                "passed": k,
                "bound_95": upper_bound(k, len(every), 0.05) if every else None,
            },
        }
    return found


def _refused(columns: Mapping[str, float], limits: Mapping[str, float]) -> bool:
    """Whether any limit is exceeded; NaN exceeds every limit."""
    return any(not columns[c] <= limit for c, limit in limits.items())


def columns_on_wrong(pool: Pool) -> dict[str, float | None]:
    """AUROC of every column for wrong against right documents."""
    right = [r["signals"] for r in pool.cases["right"] if "signals" in r]
    wrong = [r["signals"] for r in pool.cases.get("wrong_document", []) if "signals" in r]
    bad = [False] * len(right) + [True] * len(wrong)
    return {
        c: auroc([r[c] for r in (*right, *wrong)], bad) for s in SIGNALS.values() for c in s.columns
    }
