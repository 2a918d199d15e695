"""What the gate is worth on a pair, from the lines that `benchmarks.gates.pool` collected; no model runs here.

    python -m benchmarks.gates.study runs/gate

Writes study.json beside the lines. Every draw has a fixed seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gates.lines import SENDER_SIDE, Pool, config_of, damage, documents_split, gate_flops
from benchmarks.gates.pool import PLAN, RUNG
from benchmarks.gates.recalibrate import recalibrations
from benchmarks.gates.wrong import columns_on_wrong, wrong_caches
from kvbridge.errors import DataError, KVBridgeError
from kvbridge.eval.statistics.routing import risk_coverage
from kvbridge.gates.calibrate.config import GateConfig
from kvbridge.gates.calibrate.evaluate import auroc, detection, net_saving
from kvbridge.gates.calibrate.items import Attempt, GatedItem, counts_at, routed, scores_of
from kvbridge.gates.calibrate.levels import fit_rungs, hold, stop_of, thresholds_of, whole
from kvbridge.gates.decide.guarantee import interval
from kvbridge.gates.signals import DEFAULT_SIGNALS, SIGNALS
from kvbridge.handoff.cost import prefill_flops

Case = tuple[str, float | None, str | None]
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


def cases_of(pool: Pool) -> list[Case]:
    """Labels on everything, on the most frequent kind where there are several; and, where a limit of KL or loss gap calls
    hardly any or most requests of this pair damaged, what 70 % and 85 % of them stay below."""
    found = list(EVERYWHERE)
    for label, name in (("kl", "kl"), ("loss_gap", "gap")):
        damaged = [i.attempts[0].damaged for i in pool.items(label, 0.1)]
        if damaged and not 0.05 < float(np.mean(damaged)) < 0.4:
            found += [
                (label, t, None)
                for q in (0.7, 0.85)
                if (t := pool.quantile(name, q)) is not None and t > 0
            ]
    if len(pool.kinds) > 1:
        found += [(label, tau, pool.kinds[0]) for label, tau in AT_HOME]
    return list(dict.fromkeys(found))


def name_of(case: Case) -> str:
    """A case in words."""
    label, tau, kind = case
    name = (
        label
        if tau is None
        else f"{label} > {tau:g}"
        if label != "continuation"
        else f"continuation of {tau:g}"
    )
    return name + (f", {kind}" if kind else "")


def _auroc_where_given(values: Sequence[float], damaged: NDArray[np.bool_]) -> float | None:
    """AUROC over the requests that a column says something about."""
    found = np.asarray(values, dtype=np.float64)
    given = ~np.isnan(found)
    return auroc(found[given], damaged[given])


def separation(items: Sequence[GatedItem], label: str) -> dict[str, Any]:
    """AUROC per column; of the default signals' score on documents that did not fit it, and AURC beside baselines; AUROC of
    a score without the sender's and of one of all signals."""
    learn, rest = documents_split(items, 0.5, 99)
    damaged = np.array([i.attempts[0].damaged for i in rest])
    columns = {
        c: [(i.attempts[0].columns or {})[c] for i in rest]
        for s in SIGNALS.values()
        for c in s.columns
    }
    found: dict[str, Any] = {"n": len(rest), "damaged": float(damaged.mean())}
    found["columns"] = {c: _auroc_where_given(v, damaged) for c, v in columns.items()}
    try:
        signals, rungs, _ = fit_rungs(learn, config_of(label))
    except DataError as error:
        return {**found, "score": None, "why": str(error)}
    raw = rungs[0].score
    score = np.array(
        [raw(c) if (c := i.attempts[0].columns) else 1.0 for i in whole(rest, signals)]
    )
    found["score"] = auroc(score, damaged)
    others = {
        "score_without_sender": tuple(s for s in DEFAULT_SIGNALS if s not in SENDER_SIDE),
        "score_of_all": tuple(SIGNALS),
    }
    for name, wanted in others.items():
        used, (rung,), _ = fit_rungs(learn, config_of(label, wanted))
        seen = [i.attempts[0].columns for i in whole(rest, used)]
        found[name] = auroc([rung.score(c) if c else 1.0 for c in seen], damaged)
    losses = damaged.astype(float)
    rng = np.random.default_rng(0)
    found["aurc"] = {
        "score": risk_coverage(losses, score).aurc,
        "always (random order)": float(losses.mean()),
        "random, one draw": risk_coverage(losses, rng.random(len(losses))).aurc,
        "length": risk_coverage(losses, columns["length"]).aurc,
        "sender entropy": risk_coverage(losses, columns["sender_entropy"]).aurc,
        "oracle": risk_coverage(losses, losses).aurc,
    }
    order = np.argsort(score)
    found["risk_at_coverage"] = {}
    for share in (0.1, 0.2, 0.3, 0.5, 0.7, 1.0):
        n = max(1, round(share * len(order)))
        k = int(damaged[order[:n]].sum())
        found["risk_at_coverage"][f"{share:g}"] = [k / n, *interval(k, n)]
    found["detection"] = {
        f"{r:g}": detection(score[~damaged], score[damaged], r) if damaged.any() else None
        for r in (0.01, 0.05, 0.1)
    }
    return found


def carried(
    pool: Pool, label: str, tau: float | None, alpha: float, delta: float
) -> dict[str, Any]:
    """A calibration of one domain used in another: realised risk and coverage."""
    home_kind, *others = pool.kinds
    home_items = pool.items(label, tau, (home_kind,))
    lengths = [i.tokens for i in home_items] or [0]
    low, high = (int(x) for x in np.quantile(lengths, (0.4, 0.7)))
    pairs = {
        f"prompts ≤ {low} tokens → prompts > {high} tokens": (
            [i for i in home_items if i.tokens <= low],
            [i for i in home_items if i.tokens > high],
        )
    }
    pairs |= {
        f"{home_kind} → {kind}": (home_items, pool.items(label, tau, (kind,))) for kind in others
    }
    found: dict[str, Any] = {}
    for name, (home, away) in pairs.items():
        learn, test = documents_split(home, 0.5, 3)
        away = [i for i in away if i.document not in {x.document for x in learn}]
        try:
            signals, rungs, ours = fit_rungs(learn, config_of(label))
        except DataError as error:
            found[name] = {"why": str(error)}
            continue
        learn, test, away = (whole(x, signals) for x in (learn, test, away))
        scores = {n: scores_of(x, rungs) for n, x in (("home", test), ("away", away))}
        thresholds = thresholds_of(ours[:, 0])
        before = counts_at(*routed(learn, ours, 1.0), thresholds)
        counts = counts_at(*routed(test, scores["home"], 1.0), thresholds)
        level = hold(before, counts, len(test) / len(learn), alpha, delta)
        damaged = np.array([i.attempts[0].damaged for i in away])
        body: dict[str, Any] = {
            "base_risk": float(damaged.mean()) if len(away) else None,
            "away": len(away),
        }
        if level is not None:
            inside = scores["away"][:, 0] <= level.threshold
            n, k = int(inside.sum()), int(damaged[inside].sum())
            body |= {"accepted": n, "damaged": k, "risk_ci": list(interval(k, n)) if n else None}
        found[name] = body | {"held": level is not None}
    return found


def ladder(pool: Pool, label: str, tau: float | None) -> dict[str, Any]:
    """One rung against two, on the requests that were tried with both: coverage at a risk, routed as `policy.Ladder` does
    with a stop from the documents of the score, and how often the second rung would still have been cheaper than a prefill."""
    second = {r["id"]: r for r in pool.cases.get("rung", [])}
    items, affordable = [], []
    for row in pool.cases["right"]:
        other = second.get(row["id"])
        if other is None or "signals" not in row:
            continue
        attempts = tuple(
            Attempt(r.get("signals"), bool(damage(r, label, tau)) if "signals" in r else False)
            for r in (row, other)
        )
        items.append(GatedItem(row["id"], row["document"], row["tokens"], attempts))
        spent = row["handoff_flops"] + gate_flops(row)
        affordable.append(2 * spent < prefill_flops(pool.receiver, row["tokens"]))
    learn, rest = documents_split(items, 0.5, 11)
    found: dict[str, Any] = {
        "n": len(rest),
        "second_rung_affordable": float(np.mean(affordable)) if items else None,
    }
    try:
        signals, rungs, ours = fit_rungs(learn, GateConfig(label=label, plans=(PLAN, RUNG)))
    except DataError as error:
        return {**found, "why": str(error)}
    learn, rest = whole(learn, signals), whole(rest, signals)
    scores = scores_of(rest, rungs)
    for name, width in (("one rung", 1), ("two rungs", 2)):
        for risk in (0.05, 0.1, 0.2):
            stop = stop_of(learn, ours[:, :width], len(rest) / len(learn), risk, 0.05)
            score, damaged = routed(rest, scores[:, :width], stop)
            counts = [
                (n, k)
                for _, n, k in counts_at(score, damaged, thresholds_of(score))
                if n and k / n <= risk
            ]
            found[f"{name} at risk {risk:g}"] = max((n for n, _ in counts), default=0) / max(
                1, len(rest)
            )
    return found


def savings(pool: Pool) -> dict[str, float]:
    """Mean shares of a prefill: handoff, the default signals, and all signals."""
    rows = [r for r in pool.cases["right"] if "signals" in r]
    flops = {
        "handoff": [r["handoff_flops"] for r in rows],
        "gate": [gate_flops(r) for r in rows],
        "gate_of_all": [gate_flops(r, tuple(SIGNALS)) for r in rows],
    }
    dense = np.array([prefill_flops(pool.receiver, r["tokens"]) for r in rows], dtype=float)
    return {name: float((np.array(values) / dense).mean()) for name, values in flops.items()}


def study(folder: Path) -> dict[str, Any]:
    """All of it."""
    pool = Pool.read(folder)
    right = pool.cases["right"]
    shares = savings(pool)
    body: dict[str, Any] = {
        "requests": len(right),
        "documents": len({r["document"] for r in right}),
        "tokens": [
            int(x)
            for x in np.quantile(
                [r["tokens"] for r in right if "tokens" in r], (0, 0.1, 0.5, 0.9, 1)
            )
        ],
        "contract_refused": sum("refused" in r for r in right),
        "shares": shares,
        "labels": {},
        "wrong_columns": columns_on_wrong(pool),
        "wrong": wrong_caches(pool),
    }
    for case in cases_of(pool):
        label, tau, kind = case
        name, items = name_of(case), pool.items(label, tau, kind and (kind,))
        found: dict[str, Any] = {
            "n": len(items),
            "damaged": float(np.mean([i.attempts[0].damaged for i in items])) if items else None,
        }
        if items:
            found |= {
                "separation": separation(items, label),
                "recalibrations": recalibrations(items, label),
            }
            for value in found["recalibrations"].values():
                if isinstance(value, dict) and value["request"].get("n"):
                    coverage = value["request"]["coverage"]
                    value["net_saving"] = net_saving(
                        coverage, prefill=1, handoff=shares["handoff"], gate=shares["gate"]
                    )
        body["labels"][name] = found
        print(
            name,
            json.dumps({k: v for k, v in found.items() if k != "separation"})[:400],
            flush=True,
        )
    taus = {
        label: pool.quantile(name, 0.85, pool.kinds[0])
        for label, name in (("kl", "kl"), ("loss_gap", "gap"))
    }
    body["carried"] = {
        f"{label} > {tau:g}": carried(pool, label, tau, 0.1, 0.05)
        for label, tau in taus.items()
        if tau is not None
    }
    body["ladder"] = {
        name_of((x, t, None)): ladder(pool, x, t) for x, t in (("next_token", None), ("kl", 0.1))
    }
    return body


def main() -> None:
    """Reads the folder's lines and writes study.json there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    try:
        body = study(arguments.folder)
    except KVBridgeError as error:
        print(f"kvbridge: {error}", file=sys.stderr)
        sys.exit(1)
    (arguments.folder / "study.json").write_text(json.dumps(body, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
