"""A fit from two models and texts to a translator with held-out scores: one pass over the data,
then algebra."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch

from kvbridge.asset.leverage import Factor
from kvbridge.asset.maps.translator import Translator
from kvbridge.cache.features import hidden_layer
from kvbridge.duplicates import NearDuplicates
from kvbridge.errors import DataError, NotEnoughRows, PairRefused, UsageError
from kvbridge.fitting.clock import Clock
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.data import SPLITS, Document, read_documents
from kvbridge.fitting.held_out import score_maps
from kvbridge.fitting.leverage import solve_factors
from kvbridge.fitting.memory import MemoryPlan, check_memory, control_features, plan_layout
from kvbridge.fitting.moments import Moments
from kvbridge.fitting.pairs import FitProgress, PairSource, seen_elsewhere
from kvbridge.fitting.rows import input_rows, target_rows
from kvbridge.fitting.scores import Scores
from kvbridge.fitting.skipped import Skipped
from kvbridge.fitting.spill import spill
from kvbridge.fitting.splits import LeftOut, Splits
from kvbridge.fitting.train import largest_map, solve_controls, solve_maps
from kvbridge.model.arguments import device_of, expect
from kvbridge.model.model import Model

MARKED_SHARE = 0.1
"""Share of a split's rows from which on a mark says that they were left out."""
FORCED = (
    "fitted with --force on fewer rows than twice the features: "
    "held-out scores may be far below zero"
)
"""The mark of an asset that a user insisted on."""


@dataclass(frozen=True, eq=False)
class Fit:
    """A finished fit: the translator, its token-only control, test-split scores and where the time
    went."""

    translator: Translator
    controls: Translator | None
    scores: Scores
    timings: dict[str, float]
    config: FitConfig
    lambdas: dict[str, float]
    jitter: dict[str, float]
    corpus_digest: str
    splits: dict[str, dict[str, int]]
    marks: tuple[str, ...]
    alignment_exact_share: float
    fitted_on: tuple[str, ...] | None = None
    """Short names of the training and validation documents; None where there are too many to
    keep."""
    factors: Mapping[str, Factor] = field(default_factory=dict)
    """By stream, what leverage is measured in."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """What splits do not share."""


def fit(
    sender: Model,
    receiver: Model,
    texts: Any,
    *,
    config: FitConfig | None = None,
    device: str | torch.device | None = None,
    progress: FitProgress | None = None,
    on_plan: Callable[[MemoryPlan], None] | None = None,
) -> Fit:
    """Fits a translator from `sender` to `receiver` on `texts` (a path, a Hub dataset id, or
    strings, mappings, Documents).

    `device`: where models and moments run, by default where the receiver is. With
    `config.one_at_a_time` only one model is there at a time, the other waits in host memory, and
    the sender's rows wait on disk; both are back where they were at the end. `progress(model,
    tokens, seconds)` is called per batch, `on_plan` with the memory plan before anything runs.
    Raises DataError, NotEnoughRows, OverBudget, PairRefused or UsageError; nothing is written.
    """
    expect(sender, Model, "a model of kvbridge.load as the sender")
    expect(receiver, Model, "a model of kvbridge.load as the receiver")
    expect(config, (FitConfig, NoneType), "a FitConfig")
    config = config or FitConfig()
    pair = (sender.geometry, receiver.geometry)
    if sender is receiver or pair[0].digest == pair[1].digest:
        raise UsageError("sender and receiver are the same model: its cache needs no translation")
    entering = hidden_layer(config.receiver_features)
    layers = len(receiver.geometry.layers)
    if entering is not None and entering >= layers:
        raise UsageError(
            f"hidden:{entering} needs a receiver of more than {entering} layers, found {layers}"
        )
    where = receiver.device if device is None else device_of(device)
    clock, skipped = Clock(where), Skipped()
    splits = Splits(NearDuplicates(config.near_duplicates) if config.near_duplicates else None)
    plan = check_memory(*pair, config, where)
    if on_plan is not None:
        on_plan(plan)
    layout = plan_layout(*pair, config)
    hidden = hidden_layer(control_features(config.receiver_features)) or 0
    source = PairSource(
        sender, receiver, config, hidden, where, clock, progress or (lambda *_: None)
    )
    moments = {s: Moments(layout, device=where, precision=config.precision) for s in SPLITS[:2]}
    with ExitStack() as stack:
        store = None
        if config.one_at_a_time:
            store = stack.enter_context(
                spill(config.spill_folder, config.spill_bytes, sender.dtype)
            )
        documents = _documents(read_documents(texts, skipped), splits, config)
        for batch in source.captured(documents, store):
            if not len(batch.pairing.receiver):
                continue
            with clock.part("moments"):
                x = input_rows(layout, batch.sender, batch.receiver.hidden, batch.pairing)
                y = target_rows(layout, batch.receiver, batch.pairing)
                moments[batch.texts.split].update(x, y)
        splits.check()
        _check_rows(source, moments, sender, receiver, config)
        with clock.part("solve"):
            maps = solve_maps(*pair, moments["train"], moments["validation"], config)
            controls = solve_controls(*pair, moments["train"], moments["validation"], config)
            factors = solve_factors(moments["train"], maps.translator)
        # The largest thing a fit holds: scoring needs the device for batches and maps.
        del moments
        scores = score_maps(maps, controls.translator, source, clock)
    splits.rows.update(source.rows)
    return Fit(
        translator=maps.translator,
        controls=controls.translator,
        scores=scores,
        timings=clock.timings(),
        config=config,
        lambdas=maps.lambdas,
        jitter=maps.jitter,
        corpus_digest=splits.digest,
        splits=splits.to_json(),
        marks=_marks(maps.starved, skipped, source),
        alignment_exact_share=round(source.exact / max(1, source.covered), 6),
        fitted_on=splits.fitted_on(),
        left_out=LeftOut(dict(source.left_out), splits.left_out, splits.moved),
        factors=factors,
    )


def _documents(
    documents: Iterable[Document], splits: Splits, config: FitConfig
) -> Iterator[tuple[str, Document]]:
    """Documents with their splits as they stream by; `splits` counts them (modified)."""
    for document in documents:
        split = splits.place(document, config.fractions)
        if split is not None:
            yield split, document


def _marks(starved: bool, skipped: Skipped, source: PairSource) -> tuple[str, ...]:
    """What an asset says for good: too few rows, rows that could not be read, and where much of a
    split was another split's text."""
    marks = [FORCED] if starved else []
    unread = skipped.line()
    if unread is not None:
        marks.append(unread)
    for split in SPLITS:
        rows, left_out = source.rows.get(split, 0), source.left_out.get(split, 0)
        if left_out > MARKED_SHARE * (rows + left_out):
            marks.append(
                f"left out {left_out:,} of {rows + left_out:,} {split} rows: their text up to "
                "there also begins documents of another split"
            )
    return tuple(marks)


def _check_rows(
    source: PairSource,
    moments: dict[str, Moments],
    sender: Model,
    receiver: Model,
    config: FitConfig,
) -> None:
    """Raises PairRefused, DataError or NotEnoughRows where no honest map can come of these rows."""
    share = source.exact / max(1, source.covered)
    if share < config.min_exact_share:
        raise PairRefused(
            f"only {share:.1%} of the receiver's tokens end where a sender's token ends (expected "
            f"{config.min_exact_share:.0%}); these tokenizers cut text too differently "
            "(--min-exact-share to go on)"
        )
    rows, held = moments["train"].n, moments["validation"].n
    if rows < 2 or held < 2:
        raise DataError(
            f"expected rows to fit and validate on, found {rows} and {held}{seen_elsewhere(source)}"
        )
    features = largest_map(sender.geometry, receiver.geometry, config)
    if rows < 2 * features and not config.force:
        raise NotEnoughRows(
            f"{rows} training rows for maps of {features} inputs: expected at least "
            f"{2 * features} rows (about {2 * features * config.stride:,} tokens of training "
            "text); give more text, fewer --layers, or --force to go on"
        )
