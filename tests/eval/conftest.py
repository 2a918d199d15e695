"""Rows of a made-up pair whose truth is known, so that every figure can be checked without a
model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvbridge
from kvbridge import demo
from kvbridge.eval.run.rows import Row

PAIR = "sha256:pair"
RECOVERED = {
    "native": 1.0,
    "no_context": 0.0,
    "translated": 0.76,
    "translated_tail32": 0.82,
    "token_only": 0.54,
    "wrong_document": 0.31,
    "tail_only": 0.02,
    "tail_only32": 0.52,
    "sender": 0.45,
    "token_only_tail32": 0.61,
    "wrong_document_tail32": 0.55,
}
CORRECT = {
    "native": 0.86,
    "no_context": 0.06,
    "translated": 0.74,
    "translated_tail32": 0.78,
    "token_only": 0.30,
    "wrong_document": 0.08,
    "tail_only": 0.06,
    "tail_only32": 0.42,
    "sender": 0.55,
    "token_only_tail32": 0.48,
    "wrong_document_tail32": 0.44,
}
COST = {
    "native": 1.0,
    "translated": 0.11,
    "translated_tail32": 0.24,
    "tail_only32": 0.17,
    "token_only": 0.09,
}


def make_rows(
    documents: int = 30,
    per_document: int = 4,
    *,
    recovered: dict[str, float] | None = None,
    correct: dict[str, float] | None = None,
    gated: bool = False,
    tasks: tuple[str, ...] = ("continuation", "recall"),
    seed: int = 0,
) -> list[Row]:
    """`documents × per_document` items per task; `recovered` and `correct` replace defaults by
    condition."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for document in range(documents):
        worth = rng.lognormal(-0.4, 0.4)
        for index in range(per_document):
            item, words = f"d{document:03d}i{index}", int(rng.integers(160, 240))
            native, ease = words * rng.uniform(0.5, 0.7), rng.random()
            risk = float(np.clip(ease + rng.normal(0, 0.2), 0, 1))
            base: dict[str, Any] = {"pair": PAIR, "item": item, "document": f"doc-{document}"}
            for task in tasks:
                shares = (
                    (RECOVERED | (recovered or {}))
                    if task == "continuation"
                    else (CORRECT | (correct or {}))
                )
                names = [*shares, "gated"] if gated else list(shares)
                for name in names:
                    cost = COST.get(name, 0.05)
                    used = name != "gated" or risk < 0.6
                    source = name if name != "gated" else ("translated" if used else "native")
                    extra: dict[str, Any] = (
                        {"verdict": ("use" if used else "discard"), "score": risk}
                        if name == "gated"
                        else {}
                    )
                    common = (
                        base
                        | {"task": task, "condition": name, "prefill_share": cost if used else 1.0}
                        | extra
                    )
                    if task == "continuation":
                        noise = (
                            rng.normal(0, 2.0) if source not in ("native", "no_context") else 0.0
                        )
                        lost = (1 - shares[source]) * worth * words * 0.4
                        rows.append(
                            Row(
                                **common,
                                loss=max(0.0, native + lost + noise),
                                tokens=48,
                                characters=words,
                                kl=None
                                if source == "sender"
                                else (0.0 if source == "native" else lost / 48),
                                agreement=None
                                if source == "sender"
                                else min(1.0, 1 - (1 - shares[source]) * 0.7),
                                ttft_ms=100 * cost + float(rng.uniform(0, 5)),
                            )
                        )
                    else:
                        rows.append(
                            Row(
                                **common,
                                correct=int(ease < shares[source]),
                                chance=0.05,
                                f1=float(ease < shares[source]),
                            )
                        )
    return rows


@pytest.fixture(scope="session")
def rows_of() -> Callable[..., list[Row]]:
    return make_rows


@pytest.fixture(scope="session")
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the first demo documents of each split."""
    folder = tmp_path_factory.mktemp("demo") / "data"
    folder.mkdir()
    for split in ("train", "validation", "test"):
        lines = demo.texts(split).read_text("utf-8").splitlines()[:16]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


@pytest.fixture(scope="session")
def demo_asset(demo_data: Path) -> Path:
    """A rough translator of the demo pair on disk, with its controls."""
    sender, receiver = kvbridge.load("demo:sender"), kvbridge.load("demo:receiver")
    config = kvbridge.FitConfig(layers=1, max_tokens=64, force=True, cosine_documents=1)
    path = demo_data.parent / "asset"
    kvbridge.save_asset(kvbridge.fit(sender, receiver, str(demo_data), config=config), path)
    return path
