"""Screening a fleet: every ordered pair is predicted from a few sequences, then fitted and
measured."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvbridge.cache.prefill import capture_batch
from kvbridge.errors import EvalError, KVBridgeError
from kvbridge.eval.pair import fitted_asset, run_pair
from kvbridge.eval.run.config import RunConfig
from kvbridge.eval.run.latency import break_even, longest_text, measure_latency
from kvbridge.eval.screen.data import FleetData
from kvbridge.eval.screen.report import write_fleet_report
from kvbridge.eval.screen.similarity import canonical_correlations, linear_cka, r2_over_tokens
from kvbridge.eval.screen.verdicts import Screened, screening_summary
from kvbridge.eval.tasks.chosen import make_items
from kvbridge.eval.tasks.items import RawItem, text_of
from kvbridge.eval.tasks.start import forward
from kvbridge.files import write_file
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.data import Document
from kvbridge.fitting.rows import TextBatch, cut, pair_rows
from kvbridge.fitting.select import relative_order
from kvbridge.format import LATENCY_FILE, PREDICTORS_FILE, RUN_ASSET, SCREENING_FILE
from kvbridge.geometry import digest_json
from kvbridge.handoff.bridge import Bridge
from kvbridge.model.model import Model

SEQUENCE_TOKENS = 256
PREDICTOR_ROWS = 1200
PREDICTORS = ("end_match", "loss_gap", "cka", "cca", "r2_tokens", "r2_gain")
PAIR_REFUSALS = (KVBridgeError, torch.OutOfMemoryError)
"""What may be wrong with one pair without being a bug."""


@torch.no_grad()
def predictors(sender: Model, receiver: Model, documents: Sequence[Document]) -> dict[str, float]:
    """What can be said of a pair before fitting, from a few documents.

    `end_match`: share of receiver token ends that a sender token end meets. `loss_gap`: sender's
    minus receiver's own loss in nats per character (above 0: the receiver is the better model).
    `cka`: debiased linear CKA of each receiver layer's K and V with the most similar sender
    layer's, averaged; `cca`: mean canonical correlation of these same pairs of layers (in-sample:
    unrelated layers score above 0, too; NaN with too few tokens). `r2_tokens`: held-out R² of three
    receiver layers from the receiver's embeddings alone; `r2_gain`: what the nearest sender layer
    adds to it.
    """
    if len(documents) < 4:
        raise EvalError(f"expected at least 4 documents to predict from, found {len(documents)}")
    config = FitConfig(max_tokens=SEQUENCE_TOKENS)
    ours = [cut(sender.encode(d.text), SEQUENCE_TOKENS) for d in documents]
    theirs = [cut(receiver.encode(d.text), SEQUENCE_TOKENS) for d in documents]
    left = capture_batch(sender, ours)
    right = capture_batch(receiver, theirs, hidden_layer=0)
    batch = TextBatch("train", tuple(documents), tuple(ours), tuple(theirs))
    widths = (left.mask.shape[1], right.mask.shape[1])
    pairing = pair_rows(sender, receiver, batch, config, widths)
    step = max(1, len(pairing.sender) // PREDICTOR_ROWS)
    rows = (pairing.sender[::step], pairing.receiver[::step])
    groups = [documents[int(r) // widths[1]].group for r in rows[1]]
    depth_s, depth_r = len(sender.layers), len(receiver.layers)
    assert right.hidden is not None
    tokens = _rows(right.hidden[:, :, None], rows[1])
    similar, correlated = [], []
    for j in range(depth_r):
        for name in ("k", "v"):
            target = _rows(right.layers[j][name], rows[1])
            alike = [
                linear_cka(_rows(left.layers[i][name], rows[0]), target) for i in range(depth_s)
            ]
            similar.append(max(alike))
            correlated.append(
                _mean_correlation(_rows(left.layers[int(np.argmax(alike))][name], rows[0]), target)
            )
    alone, gains = [], []
    for j in sorted({depth_r // 4, depth_r // 2, (3 * depth_r) // 4}):
        near = relative_order(depth_s, j / max(1, depth_r - 1))[0]
        for name in ("k", "v"):
            base, both = r2_over_tokens(
                _rows(left.layers[near][name], rows[0]),
                tokens,
                _rows(right.layers[j][name], rows[1]),
                groups,
            )
            alone.append(base)
            gains.append(both - base)
    return {
        "end_match": pairing.exact / max(1, pairing.covered),
        "loss_gap": loss_per_character(sender, documents) - loss_per_character(receiver, documents),
        "cka": float(np.mean(similar)),
        "cca": float(np.mean(correlated)),
        "r2_tokens": float(np.mean(alone)),
        "r2_gain": float(np.mean(gains)),
    }


def _mean_correlation(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    """Mean canonical correlation; NaN where there are too few rows for one."""
    try:
        found = canonical_correlations(x, y)
    except EvalError:
        return float("nan")
    return float(found.mean()) if len(found) else float("nan")


@torch.no_grad()
def loss_per_character(model: Model, documents: Sequence[Document]) -> float:
    """The model's own nats per character over the first tokens of each document."""
    from transformers import DynamicCache

    nats, characters = 0.0, 0
    for document in documents:
        encoding = cut(model.encode(document.text), SEQUENCE_TOKENS)
        logits = forward(model, encoding.ids[None, :-1], DynamicCache(), 0)[0].float()
        target = encoding.ids[1:].to(logits.device)
        nats -= float(logits.log_softmax(-1).gather(1, target[:, None]).double().sum())
        characters += int(encoding.spans[-1, 1] - encoding.spans[0, 1])
    return nats / max(1, characters)


def check_fleet(names: Sequence[str]) -> None:
    """Raises EvalError unless these are two or more different models."""
    if len(names) < 2 or len(set(names)) != len(names):
        raise EvalError(f"expected two or more different models, found {', '.join(names)}")


@dataclass(frozen=True, kw_only=True)
class ScreenConfig:
    """How a fleet is screened: each pair's `fit`, at most so many `items` per task, whether to stop
    at predictors, whether to time handoffs, the `command` that reports show, and `processes` that
    share the items."""

    fit: FitConfig
    items: int
    command: str = ""
    predict_only: bool = False
    latency: bool = True
    processes: int = 1


def screen(
    models: Sequence[Model],
    data: FleetData,
    out: Path,
    config: ScreenConfig,
    *,
    say: Callable[[str], None],
    progress: Any = None,
) -> dict[str, Any]:
    """Predicts, fits and evaluates all ordered pairs into `out/<sender>__<receiver>/`, and writes
    `out/screening.json`, `report.html` and `summary.md`.

    A cut run continues: fitted assets and finished rows stay. A pair that is refused (by the fit,
    by what stands in its folder, for want of memory or items) is listed with the reason, and the
    others go on.
    """
    check_fleet([model.name for model in models])
    out.mkdir(parents=True, exist_ok=True)
    found = []
    for sender, receiver in itertools.permutations(models, 2):
        folder = out / f"{_plain(sender.name)}__{_plain(receiver.name)}"
        say(f"{sender.name} → {receiver.name}")
        before: dict[str, float] = {}
        try:
            before = _predicted(folder, sender, receiver, data)
        except PAIR_REFUSALS as error:
            say(f"no predictors: {error}")
        if config.predict_only:
            found.append(Screened(sender.name, receiver.name, before, refused="predicted only"))
            continue
        try:
            fitted = fitted_asset(sender, receiver, data.documents, folder, config.fit, say=say)
            made, excluded = make_items(data.raws, sender, receiver, limit=config.items)
            run = RunConfig(
                command=config.command,
                progress=progress,
                processes=config.processes,
                predictors=before,
            )
            summary = run_pair(sender, receiver, fitted, made, folder, run, excluded=excluded)
            tokens = None
            if config.latency:
                tokens = _break_even(folder, fitted.asset, sender, receiver, data.raws)
        except PAIR_REFUSALS as error:
            say(f"refused: {error}")
            found.append(Screened(sender.name, receiver.name, before, refused=str(error)))
            continue
        size = sum(p.stat().st_size for p in (folder / RUN_ASSET).iterdir())
        found.append(Screened(sender.name, receiver.name, before, summary, size, tokens))
    result = screening_summary(found)
    write_file(out / SCREENING_FILE, (json.dumps(result, indent=1, sort_keys=True) + "\n").encode())
    write_fleet_report(out, result, config.command)
    return result


def _predicted(folder: Path, sender: Model, receiver: Model, data: FleetData) -> dict[str, float]:
    """Predictors of a pair, kept in `predictors.json` so that a cut run does not compute them
    again."""
    path = folder / PREDICTORS_FILE
    probe = data.probe()
    key = [
        sender.geometry.digest,
        receiver.geometry.digest,
        digest_json([PREDICTORS, *(d.text for d in probe)]),
    ]
    if path.exists():
        known = json.loads(path.read_text("utf-8"))
        if known.get("pair") == key:
            return dict(known["predictors"])
    value = {k: v for k, v in predictors(sender, receiver, probe).items() if np.isfinite(v)}
    write_file(
        path,
        (json.dumps({"pair": key, "predictors": value}, indent=1, sort_keys=True) + "\n").encode(),
    )
    return value


def _break_even(
    folder: Path, asset: Any, sender: Model, receiver: Model, raws: Iterable[RawItem]
) -> int | None:
    """Break-even prompt length, measured once and kept in `latency.json`; None where a handoff is
    never faster."""
    path = folder / LATENCY_FILE
    if not path.exists():
        rows = measure_latency(
            Bridge(asset, sender=sender, receiver=receiver),
            longest_text(receiver, _texts(raws), 2048),
            repeats=3,
        )
        body = {"latency": [row.to_json() for row in rows], "break_even_tokens": break_even(rows)}
        write_file(path, (json.dumps(body, indent=1) + "\n").encode())
    found = json.loads(path.read_text("utf-8"))["break_even_tokens"]
    return None if found is None else int(found)


def _texts(raws: Iterable[RawItem]) -> list[str]:
    """Running text of the rows that have one."""
    found = []
    for raw in raws:
        try:
            found.append(text_of(raw))
        except EvalError:
            continue
    return found


def _rows(tensor: torch.Tensor, at: torch.Tensor) -> np.ndarray[Any, Any]:
    """Rows `at` of `[batch, tokens, heads, width]` as `[rows, features]`."""
    return tensor.flatten(2).flatten(0, 1)[at.to(tensor.device)].double().cpu().numpy()


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in name)
