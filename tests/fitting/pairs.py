"""Pairs of tiny models and texts with splits, for fits that take a fraction of a second."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

import kvbridge
from kvbridge.cache.prefill import capture
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.fitting.data import Document
from kvbridge.fitting.job import Fit
from tests.models import random_texts, tiny, tiny_causal, wrapped

CONFIG: dict[str, Any] = {
    "layers": 2,
    "lambdas": (1e-3, 1e-1),
    "batch_tokens": 512,
    "cosine_documents": 2,
}


@cache
def sender() -> kvbridge.Model:
    """Four layers, two KV heads."""
    return tiny("llama")


@cache
def receiver() -> kvbridge.Model:
    """Three layers, four KV heads, another width."""
    model = tiny_causal(
        "llama", 7, num_hidden_layers=3, num_key_value_heads=4, head_dim=8, hidden_size=32
    )
    return wrapped(model, name="tiny-receiver")


@cache
def documents(train: int = 24, held: int = 4, characters: int = 160) -> tuple[Document, ...]:
    """Texts with ids; the last ones are validation and test."""
    texts = random_texts(train + 2 * held, characters)
    splits = ["train"] * train + ["validation"] * held + ["test"] * held
    return tuple(
        Document(f"d{i}", t, f"d{i}", s) for i, (t, s) in enumerate(zip(texts, splits, strict=True))
    )


def fitted(texts: Any = None, *, pair: Any = None, progress: Any = None, **changes: Any) -> Fit:
    """A fit of the tiny pair; `changes` are of the configuration."""
    sending, receiving = pair or (sender(), receiver())
    config = kvbridge.FitConfig(**{**CONFIG, **changes})
    return kvbridge.fit(
        sending,
        receiving,
        documents() if texts is None else texts,
        config=config,
        progress=progress,
    )


def content_rows(
    model: kvbridge.Model, text: str
) -> tuple[KVSnapshot, dict[int, dict[str, Tensor]]]:
    """A snapshot of one text and all its rows in content space, one text at a time and without
    padding."""
    snapshot = capture(model, text)
    at = torch.arange(len(snapshot))
    return snapshot, {i: snapshot.content(model.rotation, at, i) for i in range(len(model.layers))}


def plain_r2(
    fit: Fit, texts: list[str], sender: kvbridge.Model, receiver: kvbridge.Model
) -> dict[tuple[int, str], Tensor]:
    """R² `[heads, width]` of a fit's translator over `texts`, for one tokenizer and no receiver
    features: a plain loop."""
    mapped: dict[tuple[int, str], list[Tensor]] = {}
    target: dict[tuple[int, str], list[Tensor]] = {}
    for text in texts:
        _, x = content_rows(sender, text)
        _, y = content_rows(receiver, text)
        out = fit.translator(x, None)
        for layer, name in ((i, stream) for i in y for stream in y[i]):
            mapped.setdefault((layer, name), []).append(
                out[layer][name][fit.config.sinks :].double()
            )
            target.setdefault((layer, name), []).append(y[layer][name][fit.config.sinks :].double())
    scores = {}
    for key in mapped:
        y_hat, y_all = torch.cat(mapped[key]), torch.cat(target[key])
        scores[key] = 1 - (y_all - y_hat).square().sum(0) / (y_all - y_all.mean(0)).square().sum(0)
    return scores
