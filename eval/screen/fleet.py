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

from kvbridge.errors import EvalError, KVBridgeError
from kvbridge.eval.pair import fitted_asset, run_pair
from kvbridge.eval.run.config import RunConfig
from kvbridge.eval.run.latency import break_even, longest_text, measure_latency
from kvbridge.eval.screen.data import FleetData
from kvbridge.eval.screen.predictors import PREDICTORS, predictors
from kvbridge.eval.screen.report import write_fleet_report
from kvbridge.eval.screen.verdicts import Screened, screening_summary
from kvbridge.eval.tasks.chosen import make_items
from kvbridge.eval.tasks.items import RawItem, text_of
from kvbridge.files import write_file
from kvbridge.fitting.config import FitConfig
from kvbridge.format import LATENCY_FILE, PREDICTORS_FILE, RUN_ASSET, SCREENING_FILE
from kvbridge.geometry import digest_json
from kvbridge.handoff.bridge import Bridge
from kvbridge.model.model import Model

PAIR_REFUSALS = (KVBridgeError, torch.OutOfMemoryError)
"""What may be wrong with one pair without being a bug."""


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
    screened = []
    for sender, receiver in itertools.permutations(models, 2):
        folder = out / f"{_plain(sender.name)}__{_plain(receiver.name)}"
        say(f"{sender.name} → {receiver.name}")
        before: dict[str, float] = {}
        try:
            before = _predicted(folder, sender, receiver, data)
        except PAIR_REFUSALS as error:
            say(f"no predictors: {error}")
        if config.predict_only:
            screened.append(Screened(sender.name, receiver.name, before, refused="predicted only"))
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
            screened.append(Screened(sender.name, receiver.name, before, refused=str(error)))
            continue
        size = sum(p.stat().st_size for p in (folder / RUN_ASSET).iterdir())
        screened.append(Screened(sender.name, receiver.name, before, summary, size, tokens))
    result = screening_summary(screened)
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
    tokens = json.loads(path.read_text("utf-8"))["break_even_tokens"]
    return None if tokens is None else int(tokens)


def _texts(raws: Iterable[RawItem]) -> list[str]:
    """Running text of the rows that have one."""
    texts = []
    for raw in raws:
        try:
            texts.append(text_of(raw))
        except EvalError:
            continue
    return texts


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in name)
