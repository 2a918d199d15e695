"""What `kvbridge fit` does: plan the memory, fit, save the asset, show its scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kvbridge
from kvbridge import demo
from kvbridge.asset.folder import save_asset
from kvbridge.cli.checks import check_models, check_out, check_spill
from kvbridge.cli.interrupt import leaving, left_whole
from kvbridge.cli.models import dtype_of, loaded, one_by_one
from kvbridge.cli.options import ModelOptions
from kvbridge.cli.output import decimals, emit, say, table
from kvbridge.cli.progress import tokens_read
from kvbridge.errors import OverBudget, UsageError
from kvbridge.eval.pair import fit_line
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.data import check_data
from kvbridge.fitting.job import Fit
from kvbridge.fitting.memory import MemoryPlan, check_memory, plan_memory
from kvbridge.geometry import KVGeometry
from kvbridge.model.outline import outline


@dataclass(frozen=True)
class FitCommand:
    """What was asked for on the command line. `data` None: the demo's texts."""

    models: ModelOptions
    data: str | None
    out: Path
    config: FitConfig
    dry_run: bool
    as_json: bool

    @property
    def texts(self) -> str:
        """Where the texts are."""
        return self.data or demo_texts()


def demo_texts() -> str:
    """The folder of the demo's texts."""
    return str(demo.texts("train").parent)


def run_fit(asked: FitCommand) -> None:
    """Fits and saves; with `dry_run`, shows the memory plan and refuses what would not fit."""
    with leaving(lambda: left_whole("a translator", asked.out)):
        _run(asked)


def _run(asked: FitCommand) -> None:
    sides = list(zip(asked.models.names, asked.models.adapters, strict=True))
    if sides[0] == sides[1]:
        raise UsageError("sender and receiver are the same model: its cache needs no translation")
    if not asked.dry_run:
        check_out(asked.out, new="assets")
        check_data(asked.texts)
        check_spill(asked.config.spill_folder)
    check_models(asked.models)
    planned = _plan(asked)
    if asked.dry_run:
        return
    fit, digest = _fitted(asked, None if planned else _say_plan)
    say(fit_line(fit))
    if asked.as_json:
        emit(
            {
                "asset": str(asked.out),
                "digest": digest,
                "timings": fit.timings,
                "scores": fit.scores.to_json(),
                "marks": list(fit.marks),
                "left_out": vars(fit.left_out),
            }
        )
        return
    title = " → ".join(str(name) for name in asked.models.names)
    _scores(f"{title}, held-out scores", fit.scores.to_json())
    for line in (*fit.left_out.lines(), *fit.marks):
        say(line)
    print(f"{asked.out}: digest {digest}")


def _fitted(asked: FitCommand, on_plan: Callable[[MemoryPlan], None] | None) -> tuple[Fit, str]:
    """The fit, saved, and its digest."""
    load = one_by_one if asked.config.one_at_a_time else loaded
    sender, receiver = load(asked.models)
    with tokens_read("fit") as progress:
        fit = kvbridge.fit(
            sender,
            receiver,
            asked.texts,
            config=asked.config,
            device=asked.models.device,
            progress=progress,
            on_plan=on_plan,
        )
    return fit, save_asset(fit, asked.out)


def _plan(asked: FitCommand) -> bool:
    """Shows the memory plan and refuses one that is over its budget, before any weight is read;
    False where a model's configuration does not tell its shapes, unless nothing but the plan was
    asked for: then the models are loaded for it."""
    device = torch.device(asked.models.device)
    sides: list[KVGeometry] = []
    for name in map(str, asked.models.names):
        side = outline(name, dtype_of(asked.models, name), device)
        if side is not None:
            sides.append(side)
    told = len(sides) == len(asked.models.names)
    if not told and not asked.dry_run:
        return False
    if not told:
        sides = [model.geometry for model in loaded(asked.models)]
    sender, receiver = sides
    plan = plan_memory(sender, receiver, asked.config, device, loaded=not told)
    refusal: OverBudget | None = None
    try:
        check_memory(sender, receiver, asked.config, device, loaded=not told)
    except OverBudget as error:
        refusal = error
    if not asked.dry_run:
        _say_plan(plan)
    elif asked.as_json:
        emit(_plan_json(plan, refusal is None))
    else:
        print("\n".join(plan.lines()))
    if refusal is not None:
        raise refusal
    return True


def _say_plan(plan: MemoryPlan) -> None:
    say("; ".join(plan.lines()))


def _plan_json(plan: MemoryPlan, fits: bool) -> dict[str, Any]:
    models = {
        role: {**vars(side), "bytes": side.nbytes}
        for role, side in (("sender", plan.sender), ("receiver", plan.receiver))
    }
    totals = {
        "models_bytes": plan.models_bytes,
        "peak_bytes": plan.peak_bytes,
        "total_bytes": plan.total_bytes,
    }
    return {**vars(plan), **models, **totals, "fits": fits}


def _scores(title: str, scores: dict[str, Any]) -> None:
    """One row per receiver layer; each R² beside that of the map that saw no sender."""
    control = scores["token_only"]
    columns = (
        scores["k_r2"],
        control["k_r2"],
        scores["v_r2"],
        control["v_r2"],
        scores["attention_cosine"],
    )
    rows = []
    for layer, *values in zip(scores["layers"], *columns, strict=True):
        rows.append([str(layer), *map(decimals, values)])
    names = ["receiver layer", "K R²", "token-only", "V R²", "token-only", "attention cosine"]
    table(title, names, rows)
