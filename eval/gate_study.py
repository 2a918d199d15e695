"""What the gate is worth on the demo pair, from the lines that `kvbridge.eval.gate_pool` collected; no model runs here.

    python -m kvbridge.eval.gate_study runs/gate

Writes study.json and study.md beside the lines. Every draw has a fixed seed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbridge.cost import prefill_flops
from kvbridge.errors import DataError
from kvbridge.eval.gate_pool import PARTS, PLAN, RUNG, receiver_geometry
from kvbridge.eval.routing import risk_coverage
from kvbridge.gates.calibrate import GateConfig, fit_rungs, hold, thresholds_of, whole
from kvbridge.gates.evaluate import auroc, detection, net_saving
from kvbridge.gates.guarantee import conformal_threshold, interval, upper_bound
from kvbridge.gates.items import Attempt, Item, counts_at, scores_of
from kvbridge.gates.labels import LABELS
from kvbridge.gates.outcomes import Outcome
from kvbridge.gates.signals import SIGNALS

DOMAINS = {"prose": ("train", "validation", "test"), "tasks": ("recall",)}
CASES: tuple[tuple[str, float | None, str | None], ...] = (
    ("next_token", None, None), ("continuation", 4.0, None), ("kl", 0.1, None), ("loss_gap", 0.1, None),
    ("next_token", None, "prose"), ("continuation", 4.0, "prose"), ("kl", 0.1, "prose"), ("kl", 0.02, "prose"),
    ("loss_gap", 0.1, "prose"), ("lost_answer", None, None),
)  # fmt: skip
LEVELS = ((0.02, 0.05), (0.05, 0.05), (0.1, 0.05), (0.2, 0.05))
SPLITS, DRAWS = 10, 30
SENDER_SIDE = ("sender_first", "sender_tail", "tail_loss", "sender_next")


@dataclass(frozen=True, eq=False)
class Pool:
    """Lines by case: `right` the pool itself."""

    cases: dict[str, list[dict[str, Any]]]

    @classmethod
    def read(cls, folder: Path) -> Pool:
        """Every line of both files; a torn last one is left out."""
        cases: dict[str, list[dict[str, Any]]] = {}
        for path in (folder / name for name in PARTS if (folder / name).exists()):
            for line in path.read_bytes().rpartition(b"\n")[0].splitlines():
                for row in json.loads(line)["rows"]:
                    cases.setdefault(row["case"], []).append(row)
        return cls(cases)

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


def recalibrations(items: Sequence[Item], label: str) -> dict[str, Any]:
    """Coverage and realised violations per (α, δ), over SPLITS scores × DRAWS calibration samples each.

    A third of the documents fits the score; the others are the population, known exactly. Calibration samples of a third
    of all requests are drawn from it with replacement: by request, as the theorem wants, and by document.
    """
    found: dict[str, Any] = {f"{a:g}/{d:g}": {"request": [], "document": []} for a, d in LEVELS}
    conformal = []
    for split in range(SPLITS):
        learn, population = documents_split(items, 1 / 3, split)
        try:
            signals, rungs, ours = fit_rungs(learn, config_of(label))
        except DataError:
            continue
        learn, population = whole(learn, signals), whole(population, signals)
        theirs = scores_of(population, rungs)[:, 0]
        thresholds = thresholds_of(ours)
        before = counts_at(learn, ours, thresholds)
        damaged = np.array([i.attempts[0].damaged for i in population])
        groups: dict[str, list[int]] = {}
        for place, item in enumerate(population):
            groups.setdefault(item.document, []).append(place)
        members = [np.array(g) for g in groups.values()]
        size = len(population) // 2
        rng = np.random.default_rng(1000 + split)
        for _ in range(DRAWS):
            drawn = {"request": rng.integers(0, len(population), size)}
            chosen = np.concatenate([members[i] for i in rng.integers(0, len(members), len(members))])
            drawn["document"] = chosen[:size]
            for how, at in drawn.items():
                counts = [
                    (t, int((theirs[at] <= t).sum()), int(damaged[at][theirs[at] <= t].sum())) for t in thresholds
                ]
                for alpha, delta in LEVELS:
                    level = hold(before, counts, size / len(learn), alpha, delta)
                    found[f"{alpha:g}/{delta:g}"][how].append(realised(level, theirs, damaged))
            at = drawn["request"]
            fine = np.isfinite(theirs[at])
            limit = conformal_threshold(np.where(fine, theirs[at], 2.0), damaged[at] & fine, 0.05)
            conformal.append(0.0 if limit is None else float((damaged & (theirs <= limit)).mean()))
    return {**{k: {h: summary(v, float(k.split("/")[0])) for h, v in x.items()} for k, x in found.items()},
            "conformal_0.05": float(np.mean(conformal)) if conformal else None}  # fmt: skip


def realised(level: Any, scores: NDArray[np.float64], damaged: NDArray[np.bool_]) -> tuple[float, float]:
    """(coverage, risk) over the population; (0, 0) where nothing holds."""
    if level is None:
        return 0.0, 0.0
    inside = scores <= level.threshold
    return float(inside.mean()), float(damaged[inside].mean()) if inside.any() else 0.0


def summary(runs: Sequence[tuple[float, float]], alpha: float) -> dict[str, Any]:
    """How often the guarantee was broken, and the coverage."""
    if not runs:
        return {"n": 0}
    coverage, risk = np.array(runs).T
    broken = int((risk > alpha).sum())
    return {
        "n": len(runs), "calibrated": float((coverage > 0).mean()), "coverage": float(coverage.mean()),
        "coverage_10_90": [float(x) for x in np.quantile(coverage, (0.1, 0.9))], "violations": broken,
        "violation_ci": list(interval(broken, len(runs))), "mean_risk": float(risk[coverage > 0].mean()) if (coverage > 0).any() else None,
    }  # fmt: skip


def separation(items: Sequence[Item], label: str) -> dict[str, Any]:
    """AUROC per column, of the score on documents that did not fit it, and AURC beside baselines."""
    learn, rest = documents_split(items, 0.5, 99)
    damaged = np.array([i.attempts[0].damaged for i in rest])
    columns = {c: np.array([i.attempts[0].columns[c] for i in rest]) for s in SIGNALS.values() for c in s.columns}  # type: ignore[index]
    found: dict[str, Any] = {"n": len(rest), "damaged": float(damaged.mean())}
    found["columns"] = {c: auroc(np.nan_to_num(v), damaged) for c, v in columns.items()}
    try:
        signals, rungs, _ = fit_rungs(learn, config_of(label))
    except DataError as error:
        return {**found, "score": None, "why": str(error)}
    rest = whole(rest, signals)
    raw = rungs[0].score
    score = np.array([raw(i.attempts[0].columns) if i.attempts[0].columns else 1.0 for i in rest])
    found["score"] = auroc(score, damaged)
    quiet = tuple(s for s in SIGNALS if s not in SENDER_SIDE)
    _, bare, _ = fit_rungs(learn, config_of(label, quiet))
    found["score_without_sender"] = auroc([bare[0].score(i.attempts[0].columns) if i.attempts[0].columns else 1.0 for i in rest], damaged)  # fmt: skip
    losses = damaged.astype(float)
    rng = np.random.default_rng(0)
    found["aurc"] = {
        "score": risk_coverage(losses, score).aurc, "always (random order)": float(losses.mean()),
        "random, one draw": risk_coverage(losses, rng.random(len(losses))).aurc,
        "length": risk_coverage(losses, columns["length"]).aurc,
        "sender entropy": risk_coverage(losses, columns["sender_entropy"]).aurc,
        "oracle": risk_coverage(losses, losses).aurc,
    }  # fmt: skip
    order = np.argsort(score)
    found["risk_at_coverage"] = {}
    for share in (0.1, 0.2, 0.3, 0.5, 0.7, 1.0):
        n = max(1, round(share * len(order)))
        k = int(damaged[order[:n]].sum())
        found["risk_at_coverage"][f"{share:g}"] = [k / n, *interval(k, n)]
    found["detection"] = {f"{r:g}": detection(score[~damaged], score[damaged], r) if damaged.any() else None for r in (0.01, 0.05, 0.1)}  # fmt: skip
    return found


def wrong_caches(pool: Pool) -> dict[str, Any]:
    """How many wrong caches pass the limits alone, set on a third of the documents; and what the limits cost."""
    items = pool.items("next_token", None)
    learn, rest = documents_split(items, 1 / 3, 5)
    held = {i.document for i in rest}
    found: dict[str, Any] = {}
    sets = {
        "all signals": tuple(SIGNALS),
        "without the sender model": tuple(s for s in SIGNALS if s not in SENDER_SIDE),
        "tail residual alone": ("tail_residual", "length"),
        "first layers alone": ("first_layers", "length"),
        "leverage alone": ("leverage", "length"),
    }
    for name, signals in sets.items():
        used, rungs, _ = fit_rungs(learn, config_of("next_token", signals))
        limits = rungs[0].limits
        refuses = lambda row, limits=limits: any(row["signals"][c] > limit for c, limit in limits.items())  # noqa: E731
        extra = [any(i.attempts[0].columns[c] > limit for c, limit in limits.items()) for i in rest]  # type: ignore[index]
        cases = {}
        for case, rows in pool.cases.items():
            if case not in ("right", "rung"):
                known = [r for r in rows if r["document"] in held and "signals" in r]
                passed = sum(not refuses(r) for r in known)
                cases[case] = {
                    "n": len(known), "passed": passed, "bound_95": upper_bound(passed, len(known), 0.05) if known else None,
                }  # fmt: skip
        every = [r for r in pool.cases.get("wrong_document", []) if "signals" in r]
        k = sum(not refuses(r) for r in every)
        found[name] = {
            "signals": list(used), "extra_refusals": float(np.mean(extra)), "of": len(extra), "cases": cases,
            "every_wrong_document": {"n": len(every), "passed": k, "bound_95": upper_bound(k, len(every), 0.05) if every else None},
        }  # fmt: skip
    return found


def columns_on_wrong(pool: Pool) -> dict[str, float | None]:
    """AUROC of every column for wrong against right documents."""
    right = [r["signals"] for r in pool.cases["right"] if "signals" in r]
    wrong = [r["signals"] for r in pool.cases.get("wrong_document", []) if "signals" in r]
    bad = [False] * len(right) + [True] * len(wrong)
    return {c: auroc([r[c] for r in (*right, *wrong)], bad) for s in SIGNALS.values() for c in s.columns}


def carried(pool: Pool, label: str, tau: float | None, alpha: float, delta: float) -> dict[str, Any]:
    """A calibration of one domain used in another: realised risk and coverage."""
    prose, tasks = pool.items(label, tau, ("train", "validation", "test")), pool.items(label, tau, ("recall",))
    short = [i for i in prose if i.tokens <= 100]
    long = [i for i in prose if i.tokens > 140]
    found: dict[str, Any] = {}
    for name, (home, away) in {"prose → tasks": (prose, tasks), "short → long prompts": (short, long)}.items():
        learn, test = documents_split(home, 0.5, 3)
        away = [i for i in away if i.document not in {x.document for x in learn}]
        try:
            signals, rungs, ours = fit_rungs(learn, config_of(label))
        except DataError as error:
            found[name] = {"why": str(error)}
            continue
        learn, test, away = (whole(x, signals) for x in (learn, test, away))
        scores = {n: scores_of(x, rungs) for n, x in (("home", test), ("away", away))}
        thresholds = thresholds_of(ours)
        counts = counts_at(test, scores["home"], thresholds)
        level = hold(counts_at(learn, ours, thresholds), counts, len(test) / len(learn), alpha, delta)
        damaged = np.array([i.attempts[0].damaged for i in away])
        body: dict[str, Any] = {"base_risk": float(damaged.mean()) if len(away) else None, "away": len(away)}
        if level is not None:
            inside = scores["away"][:, 0] <= level.threshold
            n, k = int(inside.sum()), int(damaged[inside].sum())
            body |= {"accepted": n, "damaged": k, "risk_ci": list(interval(k, n)) if n else None}
        found[name] = body | {"held": level is not None}
    return found


def ladder(pool: Pool, label: str, tau: float | None) -> dict[str, Any]:
    """One rung against two, on the requests that were tried with both: coverage at a risk, and how often the second rung
    would still have been cheaper than a prefill."""
    geometry = receiver_geometry()
    second = {r["id"]: r for r in pool.cases.get("rung", [])}
    items, affordable = [], []
    for row in pool.cases["right"]:
        other = second.get(row["id"])
        if other is None or "signals" not in row:
            continue
        attempts = tuple(
            Attempt(r.get("signals"), bool(damage(r, label, tau)) if "signals" in r else False) for r in (row, other)
        )
        items.append(Item(row["id"], row["document"], row["tokens"], attempts))
        spent = row["handoff_flops"] + sum(row["gate_flops"].values())
        affordable.append(2 * spent < prefill_flops(geometry, row["tokens"]))
    learn, rest = documents_split(items, 0.5, 11)
    found: dict[str, Any] = {"n": len(rest), "second_rung_affordable": float(np.mean(affordable)) if items else None}
    try:
        signals, rungs, _ = fit_rungs(learn, GateConfig(label=label, plans=(PLAN, RUNG)))
    except DataError as error:
        return {**found, "why": str(error)}
    rest = whole(rest, signals)
    scores = scores_of(rest, rungs)
    for name, some in (("one rung", scores[:, :1]), ("two rungs", scores)):
        for risk in (0.05, 0.1, 0.2):
            counts = [(n, k) for _, n, k in counts_at(rest, some, thresholds_of(some)) if n and k / n <= risk]
            found[f"{name} at risk {risk:g}"] = max((n for n, _ in counts), default=0) / max(1, len(rest))
    return found


def savings(pool: Pool) -> dict[str, float]:
    """Mean shares of a prefill: handoff and gate."""
    geometry = receiver_geometry()
    rows = [r for r in pool.cases["right"] if "signals" in r]
    dense = np.array([prefill_flops(geometry, r["tokens"]) for r in rows], dtype=float)
    handoff = np.array([r["handoff_flops"] for r in rows]) / dense
    gate = np.array([sum(r["gate_flops"].values()) for r in rows]) / dense
    return {"handoff": float(handoff.mean()), "gate": float(gate.mean())}


def study(folder: Path) -> dict[str, Any]:
    """All of it."""
    pool = Pool.read(folder)
    right = pool.cases["right"]
    shares = savings(pool)
    body: dict[str, Any] = {
        "requests": len(right), "documents": len({r["document"] for r in right}),
        "tokens": [int(x) for x in np.quantile([r["tokens"] for r in right if "tokens" in r], (0, 0.1, 0.5, 0.9, 1))],
        "contract_refused": sum("refused" in r for r in right), "shares": shares, "labels": {},
        "wrong_columns": columns_on_wrong(pool), "wrong": wrong_caches(pool),
    }  # fmt: skip
    for label, tau, kinds in CASES:
        items = pool.items(label, tau, kinds and DOMAINS[kinds])
        name = label if tau is None else f"{label} > {tau:g}" if label != "continuation" else f"continuation of {tau:g}"
        name += f", {kinds}" if kinds else ""
        found: dict[str, Any] = {
            "n": len(items),
            "damaged": float(np.mean([i.attempts[0].damaged for i in items])) if items else None,
        }
        if items:
            found |= {"separation": separation(items, label), "recalibrations": recalibrations(items, label)}
            for value in found["recalibrations"].values():
                if isinstance(value, dict) and value["request"].get("n"):
                    coverage = value["request"]["coverage"]
                    value["net_saving"] = net_saving(
                        coverage, prefill=1, handoff=shares["handoff"], gate=shares["gate"]
                    )
        body["labels"][name] = found
        print(name, json.dumps({k: v for k, v in found.items() if k != "separation"})[:400], flush=True)
    body["carried"] = {f"{label} {tau or ''}".strip(): carried(pool, label, tau, 0.1, 0.05) for label, tau in (("kl", 0.5), ("loss_gap", 0.3))}  # fmt: skip
    body["ladder"] = {f"{label} {tau or ''}".strip(): ladder(pool, label, tau) for label, tau in (("next_token", None), ("kl", 0.1))}  # fmt: skip
    return body


def main() -> None:
    """Reads the folder's lines and writes study.json there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    body = study(arguments.folder)
    (arguments.folder / "study.json").write_text(json.dumps(body, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
