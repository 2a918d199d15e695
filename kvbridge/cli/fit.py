"""What `kvbridge fit` does: plan the memory, fit, save the asset, show its scores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kvbridge
from kvbridge import demo
from kvbridge.asset.folder import save_asset
from kvbridge.cli.checks import check_out, check_spill
from kvbridge.cli.models import loaded, one_by_one
from kvbridge.cli.output import decimals, emit, say, table
from kvbridge.cli.progress import tokens_read
from kvbridge.errors import UsageError
from kvbridge.eval.pair import fit_line
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.data import check_data
from kvbridge.fitting.memory import MemoryPlan, check_memory, plan_memory
from kvbridge.model.model import Model


@dataclass(frozen=True)
class FitCommand:
    """What was asked for on the command line. `data` None: the demo's texts."""

    sender: str
    receiver: str
    data: str | None
    out: Path
    config: FitConfig
    device: str
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
    if asked.sender == asked.receiver:
        raise UsageError("sender and receiver are the same model: its cache needs no translation")
    if not asked.dry_run:
        check_out(asked.out, new="assets")
        check_data(asked.texts)
        check_spill(asked.config.spill_folder)
    load = one_by_one if asked.config.one_at_a_time else loaded
    sender, receiver = load([asked.sender, asked.receiver], asked.device)
    if asked.dry_run:
        _plan(asked, sender, receiver)
        return
    with tokens_read("fit") as progress:
        fit = kvbridge.fit(
            sender,
            receiver,
            asked.texts,
            config=asked.config,
            device=asked.device,
            progress=progress,
            on_plan=lambda plan: say("; ".join(plan.lines())),
        )
    digest = save_asset(fit, asked.out)
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
    _scores(f"{asked.sender} → {asked.receiver}, held-out scores", fit.scores.to_json())
    for line in (*fit.left_out.lines(), *fit.marks):
        say(line)
    print(f"{asked.out}: digest {digest}")


def _plan(asked: FitCommand, sender: Model, receiver: Model) -> None:
    """Shows the memory plan, then refuses one that is over its budget."""
    device = torch.device(asked.device)
    plan = plan_memory(sender.geometry, receiver.geometry, asked.config, device)
    if asked.as_json:
        emit(_plan_json(plan))
    else:
        print("\n".join(plan.lines()))
    check_memory(sender.geometry, receiver.geometry, asked.config, device)


def _plan_json(plan: MemoryPlan) -> dict[str, Any]:
    fits = plan.peak_bytes <= plan.budget_bytes
    return {**vars(plan), "peak_bytes": plan.peak_bytes, "fits": fits}


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
