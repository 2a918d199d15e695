"""From texts to a calibration: statistics, a score, thresholds with a guarantee, and a report, each on its own documents."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvbridge.asset import Asset
from kvbridge.bridge import Bridge, Evidence
from kvbridge.cost import prefill_flops
from kvbridge.errors import DataError, UsageError
from kvbridge.gates.calibration import Calibration, Rung
from kvbridge.gates.evaluate import auroc, table_of
from kvbridge.gates.extras import Extras, Gathering
from kvbridge.gates.guarantee import (
    Tested,
    check_levels,
    conformal_threshold,
    fixed_sequence,
    interval,
    items_needed,
    start_at,
)
from kvbridge.gates.items import (
    Attempt,
    Floats,
    Item,
    as_columns,
    counts_at,
    limits_of,
    matrix,
    outcome_at,
    scores_of,
)
from kvbridge.gates.labels import LABELS
from kvbridge.gates.passing import Sample, watch
from kvbridge.gates.reading import Inapplicable, Reading
from kvbridge.gates.score import fit_score
from kvbridge.gates.signals import SIGNALS
from kvbridge.repair import RepairPlan

PARTS = {"statistics": 0.1, "score": 0.3, "thresholds": 0.4, "report": 0.2}
STEPS = 40


@dataclass(frozen=True)
class GateConfig:
    """What a calibration is asked for. `alpha`: risk of the strict level, `lenient_alpha` of the lenient one, each at
    confidence 1 − `delta`; `label`, `tau`: what counts as damage; `plans`: the repair ladder, cheapest first."""

    label: str = "next_token"
    tau: float | None = None
    alpha: float = 0.02
    lenient_alpha: float = 0.1
    delta: float = 0.05
    plans: tuple[RepairPlan, ...] = (RepairPlan(tail=17),)
    signals: tuple[str, ...] = field(default_factory=lambda: tuple(SIGNALS))

    def __post_init__(self) -> None:
        check_levels(self.alpha, self.delta)
        check_levels(self.lenient_alpha, self.delta)
        if self.label not in LABELS:
            raise UsageError(f"expected label to be one of {', '.join(LABELS)}, found {self.label!r}")
        unknown = [s for s in self.signals if s not in SIGNALS]
        if unknown or not self.signals or not self.plans or len(set(self.plans)) != len(self.plans):
            raise UsageError(
                f"expected signals of {', '.join(SIGNALS)} and different plans, found {unknown or self.plans}"
            )
        if self.alpha > self.lenient_alpha:
            raise UsageError(f"expected alpha ≤ lenient_alpha, found {self.alpha} and {self.lenient_alpha}")

    @property
    def limit(self) -> float:
        """τ, or the label's own."""
        default = LABELS[self.label].default
        return self.tau if self.tau is not None else default if default is not None else 0.0


def part_of(document: str) -> str:
    """The part a document is in, drawn by a hash of its name: the same on every machine."""
    draw = (
        int.from_bytes(hashlib.sha256(b"gate/" + document.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64
    )
    for name, share in PARTS.items():
        draw -= share
        if draw < 0:
            return name
    return "report"


def gather(bridge: Bridge, samples: Iterable[Sample], plan: RepairPlan) -> Extras:
    """The statistics that signals need, from one pass over `samples`."""
    gathering = Gathering(bridge.sender.geometry, bridge.receiver.geometry)
    for seen in watch(bridge, samples, plan, outcomes=False):
        if seen.evidence is not None:
            reading = Reading(seen.evidence, Extras())
            gathering.update(seen.evidence, seen.request.native, reading.sampled(), reading.tail)
    return gathering.solve()


@torch.no_grad()
def read_signals(
    evidence: Evidence, extras: Extras, names: Sequence[str] = tuple(SIGNALS)
) -> tuple[dict[str, float], dict[str, int]]:
    """Column → number (NaN where a signal does not apply) and FLOPs by part."""
    reading = Reading(evidence, extras)
    found: dict[str, float] = {}
    for name in names:
        signal = SIGNALS[name]
        try:
            values = signal.read(reading)
        except Inapplicable:
            values = (math.nan,) * len(signal.columns)
        found.update(zip(signal.columns, values, strict=True))
    return found, reading.spent


def read_items(
    bridge: Bridge, samples: Sequence[Sample], extras: Extras, config: GateConfig, *,
    progress: Callable[[int], None] | None = None,
) -> list[Item]:  # fmt: skip
    """Every request on every rung; requests that the label says nothing about are left out."""
    label = LABELS[config.label]
    attempts: dict[str, list[Attempt]] = {}
    about: dict[str, tuple[str, int]] = {}
    silent: set[str] = set()
    for plan in config.plans:
        for seen in watch(bridge, samples, plan, progress=progress):
            name = seen.request.id
            tokens = len(seen.request.native[0]["k"]) + 1
            about[name] = (seen.request.document, tokens)
            if seen.evidence is None or seen.outcome is None:
                attempts.setdefault(name, []).append(Attempt(None, False))
                continue
            damaged = label.damaged(seen.outcome, config.limit)
            if damaged is None:
                silent.add(name)
                continue
            columns, spent = read_signals(seen.evidence, extras, config.signals)
            cost = seen.evidence.predicted_flops + sum(spent.values())
            attempts.setdefault(name, []).append(Attempt(columns, damaged, cost))
    return [
        Item(name, *about[name], tuple(tried), prefill_flops(bridge.receiver.geometry, about[name][1]))
        for name, tried in attempts.items()
        if name not in silent
    ]


@dataclass(frozen=True)
class Levels:
    """What items gave: rungs, both levels, the conformal threshold."""

    rungs: tuple[Rung, ...]
    signals: tuple[str, ...]
    strict: Tested | None
    lenient: Tested | None
    conformal: float | None


def applicable(items: Sequence[Item], signals: Sequence[str]) -> tuple[str, ...]:
    """Signals that gave finite numbers for nearly every request on every rung (the rest is dropped by name)."""
    found = []
    for name in signals:
        values = [
            [item.attempts[r].columns[c] for c in SIGNALS[name].columns]  # type: ignore[index]
            for item in items
            for r in range(len(item.attempts))
            if item.attempts[r].columns is not None
        ]
        if values and float(np.isfinite(np.array(values)).all(1).mean()) > 0.99:
            found.append(name)
    return tuple(found)


def whole(items: Sequence[Item], signals: Sequence[str]) -> list[Item]:
    """The same items; an attempt with a number missing counts as refused, as it would be at run time."""
    columns = [c for s in signals for c in SIGNALS[s].columns]
    return [
        Item(
            i.id, i.document, i.tokens,
            tuple(
                a if a.columns is not None and all(math.isfinite(a.columns[c]) for c in columns)
                else Attempt(None, a.damaged, a.flops)
                for a in i.attempts
            ),
            i.prefill,
        )
        for i in items
    ]  # fmt: skip


def fit_rungs(learn: Sequence[Item], config: GateConfig) -> tuple[tuple[str, ...], tuple[Rung, ...], Floats]:
    """The signals that apply, a score with its limits per plan, and what `learn` scored with each document left out
    `[items, rungs]`, as `scores_of` gives it. Raises DataError where `learn` cannot give a score."""
    signals = applicable(learn, config.signals)
    if not signals:
        raise DataError("no signal applies to these requests; give another repair plan")
    learn = whole(learn, signals)
    columns = [c for s in signals for c in SIGNALS[s].columns]
    rungs = []
    left_out = np.full((len(learn), len(config.plans)), np.inf)
    for number, plan in enumerate(config.plans):
        rows, damaged, at = matrix(learn, number, columns)
        score, left_out[at, number] = fit_score(columns, rows, damaged, [learn[i].document for i in at])
        rungs.append(Rung(plan, score, limits_of(learn, number, signals)))
    return signals, tuple(rungs), np.where(np.isfinite(scores_of(learn, rungs)), left_out, np.inf)


def thresholds_of(scores: Floats) -> list[float]:
    """STEPS thresholds, ascending, at equal steps of coverage of `scores` `[items, rungs]`."""
    best = scores.min(1)
    finite = best[np.isfinite(best)]
    return sorted({float(f"{np.quantile(finite, (i + 1) / STEPS):.8g}") for i in range(STEPS)}) if len(finite) else []


def hold(
    before: Sequence[tuple[float, int, int]], counts: Sequence[tuple[float, int, int]], share: float, alpha: float,
    delta: float,
) -> Tested | None:  # fmt: skip
    """The last threshold that holds on `counts`; the sequence begins where `before`, of other documents, promises most.
    `share`: how many times as many requests `counts` are of."""
    return fixed_sequence(counts[start_at(before, share, alpha) :], alpha, delta)


def fit_levels(learn: Sequence[Item], test: Sequence[Item], config: GateConfig) -> Levels:
    """Score, limits and the order of thresholds from `learn`; thresholds that hold from `test`, which shares no document
    with it. Raises DataError where `learn` cannot give a score."""
    signals, rungs, ours = fit_rungs(learn, config)
    learn, test = whole(learn, signals), whole(test, signals)
    theirs = scores_of(test, rungs)
    thresholds = thresholds_of(ours)
    before, counts = counts_at(learn, ours, thresholds), counts_at(test, theirs, thresholds)
    share = len(test) / max(1, len(learn))
    strict, lenient = (
        hold(before, counts, share, alpha, config.delta) for alpha in (config.alpha, config.lenient_alpha)
    )
    conformal = None
    if len(rungs) == 1 and len(test):
        fine = np.isfinite(theirs[:, 0])
        bad = np.array([item.attempts[0].damaged for item in test]) & fine
        found = conformal_threshold(np.where(fine, theirs[:, 0], 2.0), bad, config.alpha)
        conformal = None if found is None else min(found, 1.0)
    return Levels(rungs, signals, strict, lenient, conformal)


def seal(
    asset: Asset, extras: Extras, parts: dict[str, list[Item]], config: GateConfig, corpus: Iterable[str]
) -> Calibration:
    """Levels from the parts `score` and `thresholds`, a report from the third, all of it bound to `asset`."""
    levels = fit_levels(parts["score"], parts["thresholds"], config)
    manifest = asset.manifest
    return Calibration(
        translator=asset.digest, sender=manifest.sender.digest, receiver=manifest.receiver.digest, label=config.label,
        tau=None if LABELS[config.label].default is None else config.limit, alpha=config.alpha,
        lenient_alpha=config.lenient_alpha, delta=config.delta, signals=levels.signals, rungs=levels.rungs,
        strict=levels.strict, lenient=levels.lenient, conformal=levels.conformal,
        needed=items_needed(config.alpha, config.delta),
        counts={name: len(items) for name, items in parts.items()},
        report=report_of(whole(parts["report"], levels.signals), levels),
        corpus_digest=hashlib.sha256(json.dumps(sorted(corpus)).encode()).hexdigest(), extras=extras,
    )  # fmt: skip


def report_of(items: Sequence[Item], levels: Levels) -> dict[str, Any]:
    """Figures of the third part: nothing in it chose anything."""
    if not items:
        return {"items": 0}
    scores = scores_of(items, levels.rungs)
    rows, damaged, at = matrix(items, 0, list(levels.rungs[0].score.columns))
    found: dict[str, Any] = {"items": len(items), "damaged": int(sum(i.attempts[0].damaged for i in items))}
    for name, level in (("strict", levels.strict), ("lenient", levels.lenient)):
        if level is None:
            found[name] = None
            continue
        accepted, bad = outcome_at(items, scores, level.threshold)
        n, k = int(accepted.sum()), int(bad.sum())
        found[name] = {"coverage": round(n / len(items), 6), "accepted": n, "damaged": k, "risk_ci": list(interval(k, n)) if n else None}  # fmt: skip
    found["auroc"] = {n: round(v, 4) for n, v in sorted(table_of(as_columns(items, 0), damaged).items())}
    combined = auroc(levels.rungs[0].score.of(rows), damaged) if at else None
    found["auroc_score"] = None if combined is None else round(combined, 4)
    costs = [i.attempts[0].flops / i.prefill for i in items if i.prefill and i.attempts[0].columns is not None]
    found["cost_share"] = round(float(np.mean(costs)), 4) if costs else None
    return found


def calibrate(
    bridge: Bridge, samples: Sequence[Sample], config: GateConfig, *, progress: Callable[[int], None] | None = None
) -> Calibration:
    """The whole of it: one pass for the statistics, one per rung for the rest. `bridge` must hold an Asset."""
    if bridge.asset is None:
        raise UsageError("a calibration is bound to an asset's digest; give the bridge an asset of kvbridge.load_asset")
    split: dict[str, list[Sample]] = {name: [] for name in PARTS}
    for sample in samples:
        split[part_of(sample.document)].append(sample)
    empty = [name for name, some in split.items() if not some]
    if empty:
        raise DataError(f"expected documents in every part, found none for {', '.join(empty)}; give more documents")
    extras = gather(bridge, split["statistics"], config.plans[0])
    rest = [s for name in PARTS if name != "statistics" for s in split[name]]
    items = read_items(bridge, rest, extras, config, progress=progress)
    parts: dict[str, list[Item]] = {name: [] for name in PARTS if name != "statistics"}
    for item in items:
        parts[part_of(item.document)].append(item)
    return seal(bridge.asset, extras, parts, config, (s.id + s.text for s in samples))
