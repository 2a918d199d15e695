"""Evaluating on several processes, each with its own models and one thread; one process alone
writes the rows.

On a CPU small models leave most of a second core idle; two processes of one thread take about half
the time of one with two. Rows come back in the items' order, so but for times a run gives the same
file with any number of workers.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from kvbridge.asset.folder import load_asset, load_controls
from kvbridge.eval.conditions.setup import Setup
from kvbridge.eval.run.evaluate import Compute, Job, item_rows
from kvbridge.eval.run.rows import Row
from kvbridge.handoff.plan import RepairPlan
from kvbridge.model.load import load


@dataclass(frozen=True)
class Recipe:
    """What a worker needs to make its own Setup: names that `kvbridge.load` takes, dtype, and
    folders on disk."""

    sender: str
    receiver: str
    dtype: str
    asset: Path
    controls: Path | None
    plan: RepairPlan | None


_setup: Setup | None = None


def _start(recipe: Recipe) -> None:
    """Runs once in each worker."""
    global _setup
    torch.set_num_threads(1)
    dtype = getattr(torch, recipe.dtype)
    sender, receiver = (load(name, dtype=dtype) for name in (recipe.sender, recipe.receiver))
    asset = load_asset(recipe.asset)
    _setup = Setup.of(
        asset, load_controls(asset, recipe.controls), sender, receiver, plan=recipe.plan
    )


def _run(job: Job) -> list[Row]:
    assert _setup is not None
    return item_rows(_setup, job)


@contextmanager
def workers(recipe: Recipe, count: int) -> Iterator[Compute]:
    """Inside the block, a function that computes jobs on `count` processes, in order; they end with
    the block."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(count, _start, (recipe,)) as pool:
        yield lambda jobs: pool.imap(_run, jobs)
