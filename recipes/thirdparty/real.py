"""`make real`: fit and evaluate the third-party pair, and write its run folder."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path

from kvbridge.cli.interrupt import leaving, left_run
from kvbridge.cli.models import loaded
from kvbridge.cli.options import ModelOptions
from kvbridge.cli.output import say
from kvbridge.cli.progress import counted, tokens_read
from kvbridge.cli.show import show, show_latency
from kvbridge.clock import Stopwatch
from kvbridge.eval.pair import fitted_asset, run_pair
from kvbridge.eval.run.config import RunConfig
from kvbridge.eval.run.latency import break_even, longest_text, measure_latency
from kvbridge.eval.tasks.chosen import make_items
from kvbridge.eval.tasks.items import RawItem, read_raw
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.data import Document, read_documents
from kvbridge.handoff.bridge import Bridge
from recipes.thirdparty.pair import prepare


@dataclass(frozen=True)
class Size:
    """How much of the texts a run uses: training and validation texts (about 300 tokens each) and
    test items."""

    train: int
    validation: int
    scored: int
    items: int


FULL = Size(train=120, validation=16, scored=8, items=180)
QUICK = Size(train=30, validation=6, scored=4, items=20)
CONFIG = FitConfig(
    layers=16,
    selection="nearest",
    receiver_features="embeddings",
    lambdas=(1e-3, 1e-2, 1e-1),
    max_tokens=320,
    cosine_documents=8,
)
QUICK_CONFIG = FitConfig(
    layers=2,
    selection="nearest",
    receiver_features="embeddings",
    max_tokens=320,
    cosine_documents=2,
)


INPUTS = Path("runs/real/inputs")


def documents(texts: Path, size: Size) -> list[Document]:
    """The first texts of each split; the files come with one text of each page first, in hash
    order."""
    counts = {"train": size.train, "validation": size.validation, "test": size.scored}
    chosen: list[Document] = []
    for split, count in counts.items():
        of_split = (d for d in read_documents(str(texts)) if d.split == split)
        chosen += itertools.islice(of_split, count)
    return chosen


@dataclass(frozen=True)
class RealCommand:
    """What was asked for on the command line; the `names` of `models` are where the pair lies."""

    out: Path
    size: Size
    config: FitConfig
    latency: bool
    models: ModelOptions


def run(asked: RealCommand) -> None:
    """The whole of it into the run folder; with `latency`, handoff and prefill are timed as well.
    An interrupt says what is left."""
    with leaving(lambda: left_run(asked.out)):
        _run(asked)


def _run(asked: RealCommand) -> None:
    out, size = asked.out, asked.size
    watch = Stopwatch()
    pair = prepare(INPUTS)
    say(f"inputs ready after {watch.seconds():.0f} s")
    sender, receiver = loaded(replace(asked.models, names=(str(pair.sender), str(pair.receiver))))
    texts = documents(pair.texts, size)
    with tokens_read("fit") as progress:
        fitted = fitted_asset(
            sender, receiver, texts, out, asked.config, say=say, progress=progress
        )
    say(f"translator ready after {watch.seconds():.0f} s")
    raws: list[RawItem] = list(read_raw(str(pair.texts / "test.jsonl")))
    items, excluded = make_items(raws[size.scored :], sender, receiver, limit=size.items)
    command = "make real-quick" if size is QUICK else "make real"
    with counted("items") as counting:
        settings = RunConfig(command=command, progress=counting, processes=2)
        summary = run_pair(sender, receiver, fitted, items, out, settings, excluded=excluded)
    say(f"{watch.seconds():.0f} s in all")
    show(summary, False)
    if asked.latency:
        bridge = Bridge(fitted.asset, sender=sender, receiver=receiver)
        text = longest_text(receiver, [raw.body["text"] for raw in raws], 2048)
        rows = measure_latency(bridge, text, repeats=3)
        body = {"latency": [row.to_json() for row in rows], "break_even_tokens": break_even(rows)}
        (out / "latency.json").write_text(json.dumps(body, indent=1) + "\n", "utf-8")
        show_latency(rows)
