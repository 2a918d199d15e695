"""Where a study of the gate takes its requests from: the demo's texts, or an asset with a file or
folder of texts.

Nothing here shares a document with what the fit's maps were solved from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

import kvbridge
from kvbridge import demo
from kvbridge.asset.folder import load_asset, save_asset
from kvbridge.errors import DataError
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.data import Document, row_names, stream_rows
from kvbridge.fitting.job import fit
from kvbridge.gates.calibrate.passing import Sample
from kvbridge.handoff.bridge import Bridge

CHARACTERS, FOLLOWING_CHARACTERS, STATISTICS = (160, 800), 200, 80


@dataclass(frozen=True, eq=False)
class Source:
    """One pair with its asset; `pool`: samples that requests are made of, `statistics`: samples of
    other documents that the gate's statistics come from, `donors`: (document, text) that wrong
    caches are made of."""

    bridge: Bridge
    pool: list[Sample]
    statistics: list[Sample]
    donors: list[tuple[str, str]]


def prompts(identity: str, document: str, text: str, count: int) -> Sample:
    """A sample with `count` prompts of log-uniform length at word ends; the same for the same
    identity."""
    rng = Random(identity)
    low, high = CHARACTERS
    high = max(low, min(high, len(text) - FOLLOWING_CHARACTERS // 2))
    wanted = sorted(int(low * (high / low) ** rng.random()) for _ in range(count))
    text = text[: wanted[-1] + FOLLOWING_CHARACTERS]
    ends = {text.rfind(" ", 0, n) for n in wanted}
    return Sample(identity, document, text, tuple(sorted(e for e in ends if e > 0)))


def data_source(
    asset: Path, data: str, names: tuple[str | None, str | None], ends: int, seed: int = 7
) -> Source:
    """Requests from the test split of `data` (where no split is named all of it but what the asset
    says it was fitted on), statistics from its validation split (else from every tenth document).
    Raises DataError with no texts."""
    loaded = load_asset(asset)
    geometries = (loaded.manifest.sender, loaded.manifest.receiver)
    sender, receiver = (
        kvbridge.load(name or g.model_id, dtype=getattr(torch, g.dtype))
        for name, g in zip(names, geometries, strict=True)
    )
    rows = [r for r in _texts(data) if r[0] is not None or not loaded.manifest.knows(r[2])]
    held = [r for r in rows if r[0] == "validation"]
    test = [r for r in rows if r[0] in (None, "test")]
    if not held:
        documents = set(sorted({r[2] for r in test})[::10])
        held, test = (
            [r for r in test if r[2] in documents],
            [r for r in test if r[2] not in documents],
        )
    if not held or not test:
        raise DataError(
            f"{data}: expected texts of several documents, found {len(rows)} rows of no use here"
        )
    pool = [
        prompts(f"{kind}/{identity}", document, text, ends)
        for _, identity, document, kind, text in test
    ]
    Random(seed).shuffle(pool)
    statistics = [prompts(f"statistics/{i}", d, text, 1) for _, i, d, _, text in _thinned(held)]
    return Source(
        Bridge(loaded, sender=sender, receiver=receiver),
        pool,
        statistics,
        [(r[2], r[4][100:1300]) for r in test],
    )


def _texts(data: str) -> Iterable[tuple[str | None, str, str, str, str]]:
    """(split, id, document, kind, text) of every row of text."""
    for number, (split, name, _, row) in enumerate(stream_rows(data)):
        if isinstance(row, dict) and isinstance(row.get("text"), str):
            identity, document = row_names(row, f"{name}#{number}")
            yield (
                split,
                identity,
                document,
                str(row.get("kind") or "text").replace("/", "-"),
                row["text"],
            )


def _thinned(rows: Sequence[Any]) -> Sequence[Any]:
    return rows[:: max(1, len(rows) // STATISTICS)]


def rows_of(split: str) -> list[dict[str, Any]]:
    """A split of the demo's texts."""
    return [json.loads(line) for line in demo.texts(split).read_text("utf-8").splitlines()]


def demo_documents() -> list[Document]:
    """What the demo's asset is fitted on: half of the training documents, and validation documents
    for λ and scores."""
    train, validation = rows_of("train"), rows_of("validation")
    used = set(sorted({r["document"] for r in train})[::2])
    others = sorted({r["document"] for r in validation})
    splits = {
        **dict.fromkeys(used, "train"),
        **dict.fromkeys(others[0::4], "validation"),
        **dict.fromkeys(others[1::4], "test"),
    }
    return [
        Document(r["id"], r["text"], r["document"], splits[r["document"]])
        for r in (*train[::2], *validation[::2])
        if r["document"] in splits
    ]


def demo_pool(excluded: set[str], ends: int) -> list[Sample]:
    """Every other text with several prompts, and every recall item with one."""
    samples = []
    for split in ("train", "validation", "test"):
        for row in rows_of(split):
            if row["document"] not in excluded:
                identity = f"prose/{split}/{row['id']}"
                samples.append(prompts(identity, row["document"], row["text"], ends))
    for row in rows_of("recall"):
        if row["document"] not in excluded:
            prompt = row["context"] + row["question"]
            text, identity = prompt + row["answer"], f"recall/{row['id']}"
            samples.append(Sample(identity, row["document"], text, (len(prompt),), answer=True))
    Random(7).shuffle(samples)
    return samples


def demo_source(asset: Path, ends: int) -> Source:
    """The demo pair; its asset is fitted where none stands at `asset`. Statistics come from the
    fit's held-out texts."""
    sender, receiver = kvbridge.load("demo:sender"), kvbridge.load("demo:receiver")
    documents = demo_documents()
    if not asset.exists():
        save_asset(fit(sender, receiver, documents, config=FitConfig(max_tokens=128)), asset)
    statistics = [
        prompts(f"statistics/{d.id}", d.group, d.text, 3) for d in documents if d.split != "train"
    ]
    pool = demo_pool({d.group for d in documents}, ends)
    donors = [(r["document"], r["text"][100:1200]) for r in rows_of("test")]
    return Source(
        Bridge(load_asset(asset), sender=sender, receiver=receiver), pool, statistics, donors
    )
