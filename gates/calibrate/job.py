"""From texts to a calibration: statistics, a score, thresholds with a guarantee, and a report, each
on its own documents."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from kvbridge.asset.folder import Asset
from kvbridge.duplicates import clustered
from kvbridge.errors import DataError, UsageError
from kvbridge.gates.calibrate.config import CALIBRATION_SPLITS, GateConfig, split_of
from kvbridge.gates.calibrate.items import Attempt, GatedItem
from kvbridge.gates.calibrate.levels import fit_levels, report_of, whole
from kvbridge.gates.calibrate.passing import Sample, watch
from kvbridge.gates.decide.guarantee import items_needed
from kvbridge.gates.decide.sealed import Calibration
from kvbridge.gates.labels import LABELS
from kvbridge.gates.signals import SIGNALS, parts_of
from kvbridge.gates.signals.extras import Extras, Gathering
from kvbridge.gates.signals.reading import Inapplicable, Reading
from kvbridge.geometry import short_name
from kvbridge.handoff.bridge import Bridge
from kvbridge.handoff.cost import prefill_flops
from kvbridge.handoff.evidence import Evidence
from kvbridge.handoff.plan import RepairPlan


def gather(bridge: Bridge, samples: Iterable[Sample], plan: RepairPlan) -> Extras:
    """The statistics that signals need, from one pass over `samples`."""
    factors = {} if bridge.asset is None else bridge.asset.factors
    gathering = Gathering(bridge.sender.geometry, bridge.receiver.geometry, factors)
    for seen in watch(bridge, samples, plan, outcomes=False):
        if seen.evidence is not None:
            reading = Reading(seen.evidence, Extras())
            gathering.update(seen.evidence, seen.prompt.native, reading.sampled())
    return gathering.solve()


@torch.no_grad()
def read_signals(
    evidence: Evidence, extras: Extras, names: Sequence[str] = tuple(SIGNALS)
) -> tuple[dict[str, float], dict[str, int]]:
    """Column → number (NaN where a signal does not apply) and FLOPs by name of the part."""
    reading = Reading(evidence, extras, planned=parts_of(names))
    columns: dict[str, float] = {}
    for name in names:
        signal = SIGNALS[name]
        try:
            values = signal.read(reading)
        except Inapplicable:
            values = (math.nan,) * len(signal.columns)
        columns.update(zip(signal.columns, values, strict=True))
    return columns, reading.spent


def read_items(
    bridge: Bridge,
    samples: Sequence[Sample],
    extras: Extras,
    config: GateConfig,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[GatedItem]:
    """Every request on every rung; requests that the label says nothing about are left out.
    `progress` is told how many were read, of the prompts of all samples times rungs."""
    label = LABELS[config.label]
    attempts: dict[str, list[Attempt]] = {}
    about: dict[str, tuple[str, int]] = {}
    silent: set[str] = set()
    prompts = sum(len(sample.ends) for sample in samples)
    for number, plan in enumerate(config.plans):
        told = None if progress is None else partial(_further, progress, number * prompts)
        for seen in watch(bridge, samples, plan, progress=told):
            name = seen.prompt.id
            tokens = len(seen.prompt.native[0]["k"]) + 1
            about[name] = (seen.prompt.document, tokens)
            if seen.evidence is None or seen.outcome is None:
                attempts.setdefault(name, []).append(Attempt(None, False))
                continue
            damaged = label.damaged(seen.outcome, config.limit)
            if damaged is None:
                silent.add(name)
                continue
            columns, spent = read_signals(seen.evidence, extras, config.signals)
            cost = seen.evidence.predicted_flops + sum(spent.values())
            attempts.setdefault(name, []).append(Attempt(columns, damaged, cost, spent))
    items = []
    for name, tried in attempts.items():
        if name not in silent:
            document, tokens = about[name]
            dense = prefill_flops(bridge.receiver.geometry, tokens)
            items.append(GatedItem(name, document, tokens, tuple(tried), dense))
    return items


def _further(progress: Callable[[int], None], before: int, done: int) -> None:
    progress(before + done)


def more_for(config: GateConfig) -> str:
    """What to do about too few texts, and how many would be needed at all."""
    needed = items_needed(config.alpha, config.delta)
    return (
        "give more texts (--data, a higher --limit): a tenth of the documents gives statistics, "
        f"and α = {config.alpha:g} at δ = {config.delta:g} takes {needed} accepted requests "
        "without a failure among four tenths of them"
    )


def seal(
    asset: Asset,
    extras: Extras,
    splits: dict[str, list[GatedItem]],
    config: GateConfig,
    samples: Sequence[Sample],
) -> Calibration:
    """Levels from the splits `score` and `thresholds`, a report from the third, all of it bound to
    `asset`; `samples` are all it was made of."""
    corpus = sorted(s.id + s.text for s in samples)
    cluster = clusters_of(samples)
    decisive = [s.document for s in samples if split_of(cluster[s.document]) != "report"]
    levels = fit_levels(splits["score"], splits["thresholds"], config)
    manifest = asset.manifest
    return Calibration(
        translator=asset.digest,
        sender=manifest.sender.digest,
        receiver=manifest.receiver.digest,
        label=config.label,
        tau=None if LABELS[config.label].default is None else config.limit,
        alpha=config.alpha,
        lenient_alpha=config.lenient_alpha,
        delta=config.delta,
        signals=levels.signals,
        rungs=levels.rungs,
        stop=levels.stop,
        strict=levels.strict,
        lenient=levels.lenient,
        conformal=levels.conformal,
        needed=items_needed(config.alpha, config.delta),
        counts={name: len(items) for name, items in splits.items()},
        report=report_of(whole(splits["report"], levels.signals), levels),
        corpus_digest=hashlib.sha256(json.dumps(corpus).encode()).hexdigest(),
        documents=frozenset(map(short_name, decisive)),
        extras=extras,
    )


def clusters_of(samples: Sequence[Sample]) -> dict[str, str]:
    """For each document, the one that its near duplicates are named after: all of them are in its
    split, so that no threshold is judged on texts that it was chosen by."""
    return clustered((sample.document, sample.text) for sample in samples)


def parted(samples: Sequence[Sample], config: GateConfig) -> dict[str, list[Sample]]:
    """Samples by the split that their document and its near duplicates are in; raises DataError, saying how many it takes,
    where one is empty."""
    splits: dict[str, list[Sample]] = {name: [] for name in CALIBRATION_SPLITS}
    cluster = clusters_of(samples)
    for sample in samples:
        splits[split_of(cluster[sample.document])].append(sample)
    empty = [name for name, some in splits.items() if not some]
    if empty:
        raise DataError(
            f"expected documents in every part, found none for {', '.join(empty)}; "
            f"{more_for(config)}"
        )
    return splits


def calibrate(
    bridge: Bridge,
    samples: Sequence[Sample],
    config: GateConfig,
    *,
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """The whole of it: one pass for the statistics, one per rung for the rest. `bridge` must hold
    an Asset."""
    if bridge.asset is None:
        raise UsageError(
            "a calibration is bound to an asset's digest; "
            "give the bridge an asset of kvbridge.load_asset"
        )
    by_split = parted(samples, config)
    try:
        extras = gather(bridge, by_split["statistics"], config.plans[0])
    except DataError as error:
        raise DataError(f"{error}; {more_for(config)}") from error
    cluster = clusters_of(samples)
    judged = [name for name in CALIBRATION_SPLITS if name != "statistics"]
    rest = [sample for name in judged for sample in by_split[name]]
    splits: dict[str, list[GatedItem]] = {name: [] for name in judged}
    for item in read_items(bridge, rest, extras, config, progress=progress):
        splits[split_of(cluster[item.document])].append(item)
    return seal(bridge.asset, extras, splits, config, samples)
