"""Paired rows: both models' KV of the same texts, aligned token by token, in content space."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbridge.cache.align import Alignment, align_positions, align_spans
from kvbridge.cache.prefill import Batch
from kvbridge.cache.snapshot import LayerKV
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.data import Document
from kvbridge.fitting.layout import FEATURES, Layout
from kvbridge.model.model import Model
from kvbridge.model.text import Encoding


@dataclass(frozen=True)
class TextBatch:
    """Documents of one split with both models' encodings, cut to `max_tokens`."""

    split: str
    documents: tuple[Document, ...]
    sender: tuple[Encoding, ...]
    receiver: tuple[Encoding, ...]

    @property
    def tokens(self) -> int:
        """Receiver tokens."""
        return sum(len(e) for e in self.receiver)


def cut(encoding: Encoding, tokens: int) -> Encoding:
    """The first `tokens` tokens."""
    return Encoding(encoding.ids[:tokens], encoding.spans[:tokens])


def text_batches(
    sender: Model, receiver: Model, documents: Iterable[tuple[str, Document]], config: FitConfig
) -> Iterator[TextBatch]:
    """Batches of one split each, of at most `batch_tokens` padded tokens; within a window, texts of
    like length meet."""
    waiting: dict[str, list[tuple[Document, Encoding, Encoding]]] = {}
    for split, document in documents:
        limit_s = min(config.max_tokens, sender.geometry.max_positions)
        limit_r = min(config.max_tokens, receiver.geometry.max_positions)
        entry = (
            document,
            cut(sender.encode(document.text), limit_s),
            cut(receiver.encode(document.text), limit_r),
        )
        if len(entry[1]) and len(entry[2]):
            pool = waiting.setdefault(split, [])
            pool.append(entry)
            if sum(len(e[2]) for e in pool) >= 8 * config.batch_tokens:
                yield from _packed(split, pool, config.batch_tokens)
                pool.clear()
    for split, pool in waiting.items():
        yield from _packed(split, pool, config.batch_tokens)


def _packed(
    split: str, pool: list[tuple[Document, Encoding, Encoding]], limit: int
) -> Iterator[TextBatch]:
    current: list[tuple[Document, Encoding, Encoding]] = []
    for entry in sorted(pool, key=lambda e: (len(e[2]), e[0].id)):
        longest = max(len(entry[1]), len(entry[2]))
        if current and longest * (len(current) + 1) > limit:
            yield _batch(split, current)
            current = []
        current.append(entry)
    if current:
        yield _batch(split, current)


def _batch(split: str, entries: list[tuple[Document, Encoding, Encoding]]) -> TextBatch:
    documents, sender, receiver = zip(*entries, strict=True)
    return TextBatch(split, documents, sender, receiver)


def align_pair(sender: Model, receiver: Model, ours: Encoding, theirs: Encoding) -> Alignment:
    """Identity for equal tokenizers, else by character spans."""
    if sender.geometry.tokenizer_digest == receiver.geometry.tokenizer_digest:
        return align_positions(torch.arange(len(ours)), torch.arange(len(theirs)))
    return align_spans(ours.spans, theirs.spans)


@dataclass(frozen=True)
class Pairing:
    """Flat row numbers into two padded batches: sender `[rows]`, receiver `[rows]`; how many end
    matches were exact, of how many covered tokens."""

    sender: Tensor
    receiver: Tensor
    exact: float
    covered: int


def pair_rows(
    sender: Model, receiver: Model, batch: TextBatch, config: FitConfig, widths: tuple[int, int]
) -> Pairing:
    """Rows of a fit: covered receiver tokens after the sinks, every `stride`-th. `widths`: padded
    lengths of both."""
    left, right, exact, covered = [], [], 0.0, 0
    for number, (ours, theirs) in enumerate(zip(batch.sender, batch.receiver, strict=True)):
        alignment = align_pair(sender, receiver, ours, theirs)
        count = int(alignment.covered.sum())
        exact, covered = exact + alignment.exact_share * count, covered + count
        at = alignment.covered.nonzero()[:, 0]
        at = at[at >= config.sinks][:: config.stride]
        left.append(number * widths[0] + alignment.index[at])
        right.append(number * widths[1] + at)
    return Pairing(torch.cat(left), torch.cat(right), exact, covered)


def input_rows(layout: Layout, sender: Batch, hidden: Tensor | None, pairing: Pairing) -> Tensor:
    """Input columns `[rows, inputs]` fp32 in the layout's order."""
    device = sender.layers[0]["k"].device
    parts = []
    for (layer, name), _ in layout.inputs:
        if (layer, name) == FEATURES:
            assert hidden is not None
            parts.append(hidden.flatten(0, 1)[pairing.receiver.to(hidden.device)].to(device))
        else:
            parts.append(_flat(sender.layers[layer], name)[pairing.sender.to(device)])
    return torch.cat([p.float() for p in parts], dim=1)


def target_rows(layout: Layout, receiver: Batch, pairing: Pairing) -> Tensor:
    """Target columns `[rows, targets]` fp32 in the layout's order."""
    at = pairing.receiver.to(receiver.mask.device)
    return torch.cat(
        [_flat(receiver.layers[layer], name)[at].float() for (layer, name), _ in layout.targets],
        dim=1,
    )


def _flat(layer: LayerKV, name: str) -> Tensor:
    """`[batch · tokens, heads · width]`."""
    return layer[name].flatten(2).flatten(0, 1)
