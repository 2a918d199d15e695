"""What `kvbridge demo` does: fit the demo pair, evaluate it on held-out texts, show the result."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kvbridge
from kvbridge import demo
from kvbridge.cli.checks import check_out
from kvbridge.cli.interrupt import leaving, left_run
from kvbridge.cli.models import loaded
from kvbridge.cli.options import ModelOptions
from kvbridge.cli.output import emit, say
from kvbridge.cli.progress import counted, tokens_read
from kvbridge.cli.show import show, show_latency
from kvbridge.clock import Stopwatch
from kvbridge.eval.pair import Fitted, fitted_asset, run_pair
from kvbridge.eval.run.config import RunConfig
from kvbridge.eval.run.latency import Latency, break_even, longest_text, measure_latency
from kvbridge.eval.tasks.chosen import make_items
from kvbridge.eval.tasks.items import demo_rows
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.data import Document, read_documents
from kvbridge.format import RUN_REPORT
from kvbridge.model.model import Model

CONFIG = FitConfig(max_tokens=256)
DOCUMENTS = {"train": 240, "validation": 48, "test": 16}
RECALL_SHARE = 3
"""A question for every so many texts to continue."""


@dataclass(frozen=True)
class DemoCommand:
    """What was asked for on the command line."""

    out: Path
    items: int
    latency: bool
    as_json: bool


def run_demo(asked: DemoCommand) -> None:
    """Fits, evaluates and reports; with `latency`, handoff and prefill are timed as well."""
    with leaving(lambda: left_run(asked.out)):
        _run(asked)


def _run(asked: DemoCommand) -> None:
    check_out(asked.out)
    watch = Stopwatch()
    sender, receiver = loaded(ModelOptions(("demo:sender", "demo:receiver")))
    texts = [text for split, count in DOCUMENTS.items() for text in demo_documents(split, count)]
    with tokens_read("fit") as progress:
        fitted = fitted_asset(
            sender, receiver, texts, asked.out, CONFIG, say=say, progress=progress
        )
    summary = _evaluated(asked, sender, receiver, fitted)
    say(f"{watch.seconds():.0f} s in all; report: {asked.out / RUN_REPORT}")
    if not asked.as_json:
        show(summary, False)
    if asked.latency:
        bridge = kvbridge.Bridge(fitted.asset, sender=sender, receiver=receiver)
        rows = _latency(bridge, receiver)
        timed = [row.to_json() for row in rows]
        summary = {**summary, "latency": timed, "break_even_tokens": break_even(rows)}
        if not asked.as_json:
            show_latency(rows)
    if asked.as_json:
        emit(summary)


def _evaluated(
    asked: DemoCommand, sender: Model, receiver: Model, fitted: Fitted
) -> dict[str, Any]:
    """The summary of the run folder: texts to continue, and questions about what a text says."""
    prose, prose_excluded = make_items(demo_rows("test"), sender, receiver, limit=asked.items)
    questions = max(2, asked.items // RECALL_SHARE)
    recall, recall_excluded = make_items(demo_rows("recall"), sender, receiver, limit=questions)
    with counted("items") as progress:
        return run_pair(
            sender,
            receiver,
            fitted,
            [*prose, *recall],
            asked.out,
            RunConfig(
                command="kvbridge demo", progress=progress, processes=min(2, os.cpu_count() or 1)
            ),
            excluded=[*prose_excluded, *recall_excluded],
        )


def _latency(bridge: kvbridge.Bridge, receiver: Model) -> list[Latency]:
    texts = [row.body["text"] for row in demo_rows("test")]
    return measure_latency(bridge, longest_text(receiver, texts, 2048))


def demo_documents(split: str, count: int) -> list[Document]:
    """The first documents of one of the demo's splits."""
    documents = read_documents(str(demo.texts(split)))
    return [replace(document, split=split) for document in itertools.islice(documents, count)]
