"""Paired rows: both models' KV of the same texts, aligned token by token, in content space."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvbridge.cache.align import Alignment, align_positions, align_spans
from kvbridge.cache.prefill import Batch
from kvbridge.cache.snapshot import LayerKV
from kvbridge.fitting.beginnings import Beginnings
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.data import Document
from kvbridge.fitting.layout import FEATURES, Layout
from kvbridge.model.beginning import encode_beginning
from kvbridge.model.model import Model
from kvbridge.model.text import Encoding

WINDOW = 8
"""Batches whose texts are sorted by length together."""


class Encoded(NamedTuple):
    """One document with both models' encodings, and where it is its split's own `[tokens]`."""

    document: Document
    sender: Encoding
    receiver: Encoding
    own: Tensor


@dataclass(frozen=True)
class TextBatch:
    """Documents of one split with both models' encodings, cut to `max_tokens`. `own`, per document
    `[receiver tokens]`: whether the text up to there is this split's own; None: all of it is."""

    split: str
    documents: tuple[Document, ...]
    sender: tuple[Encoding, ...]
    receiver: tuple[Encoding, ...]
    own: tuple[Tensor, ...] | None = None

    @property
    def tokens(self) -> int:
        """Receiver tokens."""
        return sum(len(e) for e in self.receiver)


def text_batches(
    sender: Model, receiver: Model, documents: Iterable[tuple[str, Document]], config: FitConfig
) -> Iterator[TextBatch]:
    """Batches of one split each, of at most `batch_tokens` padded tokens; within a window, texts of
    like length meet. A text's beginning belongs to the split that saw it first."""
    beginnings = Beginnings()
    sender_limit = min(config.max_tokens, sender.geometry.max_positions)
    receiver_limit = min(config.max_tokens, receiver.geometry.max_positions)
    waiting: dict[str, list[Encoded]] = {}
    for split, document in documents:
        read = encode_beginning(sender, document.text, sender_limit)
        written = encode_beginning(receiver, document.text, receiver_limit)
        if len(read) and len(written):
            pool = waiting.setdefault(split, [])
            own = beginnings.own(split, document.text, written.spans[:, 1])
            # Of a long document only what is read is kept: test batches wait until the end.
            end = int(max(read.spans[-1, 1], written.spans[-1, 1]))
            pool.append(Encoded(replace(document, text=document.text[:end]), read, written, own))
            # Of a window of several batches, texts of like length go together: little padding.
            if sum(len(entry.receiver) for entry in pool) >= WINDOW * config.batch_tokens:
                yield from _packed(split, pool, config.batch_tokens)
                pool.clear()
    for split, pool in waiting.items():
        yield from _packed(split, pool, config.batch_tokens)


def _packed(split: str, pool: list[Encoded], limit: int) -> Iterator[TextBatch]:
    """Batches of a pool, shortest texts first; `limit` bounds what either model's padding makes."""
    current: list[Encoded] = []
    for entry in sorted(pool, key=lambda e: (len(e.receiver), e.document.id)):
        longest = max(len(entry.sender), len(entry.receiver))
        if current and longest * (len(current) + 1) > limit:
            yield _batch(split, current)
            current = []
        current.append(entry)
    if current:
        yield _batch(split, current)


def _batch(split: str, entries: list[Encoded]) -> TextBatch:
    documents, sender, receiver, own = zip(*entries, strict=True)
    return TextBatch(split, documents, sender, receiver, own)


def align_pair(sender: Model, receiver: Model, read: Encoding, written: Encoding) -> Alignment:
    """Which token of `read`, the sender's, serves each token of `written`, the receiver's.

    Identity for equal tokenizers, else by character spans.
    """
    if sender.geometry.tokenizer_digest == receiver.geometry.tokenizer_digest:
        return align_positions(torch.arange(len(read)), torch.arange(len(written)))
    return align_spans(read.spans, written.spans)


@dataclass(frozen=True)
class Pairing:
    """Flat row numbers into two padded batches: sender `[rows]`, receiver `[rows]`; how many end
    matches were exact, of how many covered tokens; and how many rows are another split's."""

    sender: Tensor
    receiver: Tensor
    exact: float
    covered: int
    left_out: int = 0


def pair_rows(
    sender: Model, receiver: Model, batch: TextBatch, config: FitConfig, widths: tuple[int, int]
) -> Pairing:
    """Rows of a fit: covered receiver tokens after the sinks, every `stride`-th, less those whose
    text another split saw first. `widths`: padded lengths of both."""
    sender_rows, receiver_rows, exact, covered, left_out = [], [], 0.0, 0, 0
    for number, (read, written) in enumerate(zip(batch.sender, batch.receiver, strict=True)):
        alignment = align_pair(sender, receiver, read, written)
        count = int(alignment.covered.sum())
        exact, covered = exact + alignment.exact_share * count, covered + count
        at = alignment.covered.nonzero()[:, 0]
        # Sinks are recomputed in every handoff, and their keys and values lie far from all others:
        # as rows, they would bend every map towards what is never translated.
        at = at[at >= config.sinks][:: config.stride]
        if batch.own is not None:
            own = at[batch.own[number][at]]
            left_out += len(at) - len(own)
            at = own
        sender_rows.append(number * widths[0] + alignment.index[at])
        receiver_rows.append(number * widths[1] + at)
    return Pairing(torch.cat(sender_rows), torch.cat(receiver_rows), exact, covered, left_out)


def input_rows(layout: Layout, sender: Batch, hidden: Tensor | None, pairing: Pairing) -> Tensor:
    """Input columns `[rows, inputs]` fp32 in the layout's order."""
    device = sender.layers[0]["k"].device
    blocks = []
    for (layer, name), _ in layout.inputs:
        if (layer, name) == FEATURES:
            assert hidden is not None
            block = hidden.flatten(0, 1)[pairing.receiver.to(hidden.device)].to(device)
        else:
            block = _flat(sender.layers[layer], name)[pairing.sender.to(device)]
        blocks.append(block.float())
    return torch.cat(blocks, dim=1)


def target_rows(layout: Layout, receiver: Batch, pairing: Pairing) -> Tensor:
    """Target columns `[rows, targets]` fp32 in the layout's order."""
    at = pairing.receiver.to(receiver.mask.device)
    blocks = []
    for (layer, name), _ in layout.targets:
        blocks.append(_flat(receiver.layers[layer], name)[at].float())
    return torch.cat(blocks, dim=1)


def _flat(layer: LayerKV, name: str) -> Tensor:
    """`[batch · tokens, heads · width]`."""
    return layer[name].flatten(2).flatten(0, 1)
