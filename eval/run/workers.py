"""Evaluating on several processes, each with its own models and one thread; one process alone
writes the rows.

On a CPU small models leave most of a second core idle; two processes of one thread take about half
the time of one with two. Rows come back in the items' order, so but for times a run gives the same
file with any number of workers.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import torch

from kvbridge.asset.folder import load_asset, load_controls
from kvbridge.eval.conditions.setup import Setup
from kvbridge.eval.run.evaluate import Compute, Job, item_rows
from kvbridge.eval.run.rows import Row
from kvbridge.handoff.plan import RepairPlan
from kvbridge.model.load import load
from kvbridge.model.model import Model


@dataclass(frozen=True)
class Source:
    """What `kvbridge.load` makes the same model of again."""

    name: str
    dtype: str
    adapter: str | None

    @classmethod
    def of(cls, model: Model) -> Source:
        """Where a model came from."""
        return cls(model.name, model.geometry.dtype, model.adapter)

    def load(self) -> Model:
        """The model, on the CPU."""
        return load(self.name, dtype=getattr(torch, self.dtype), adapter=self.adapter)


@dataclass(frozen=True)
class Recipe:
    """What a worker needs to make its own Setup: both models as `kvbridge.load` takes them, and
    folders on disk."""

    sender: Source
    receiver: Source
    asset: Path
    controls: Path | None
    plan: RepairPlan | None


_setup: Setup | None = None


def _start(recipe: Recipe) -> None:
    """Runs once in each worker."""
    global _setup
    torch.set_num_threads(1)
    sender, receiver = recipe.sender.load(), recipe.receiver.load()
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
    with _deaf_processes():
        pool = context.Pool(count, _start, (recipe,))
    with pool:
        yield lambda jobs: pool.imap(_run, jobs)


@contextmanager
def _deaf_processes() -> Iterator[None]:
    """Processes that start inside the block never hear SIGINT.

    Ctrl-C goes to all of them; the one that started them ends them. A blocked signal is inherited
    and, other than an ignored one, not lost here: it arrives when the block ends.
    """
    # The tracker unblocks signals once it has started: it must be there before they are blocked.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
