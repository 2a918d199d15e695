"""Both models' KV of every batch: side by side, or one model at a time with the sender's rows on
disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from kvbridge.cache.prefill import Batch, capture_batch
from kvbridge.fitting.clock import Clock
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.data import Document
from kvbridge.fitting.rows import Pairing, TextBatch, pair_rows, text_batches
from kvbridge.fitting.spill import Spill
from kvbridge.model.model import Model

FitProgress = Callable[[str, int, float], None]
"""Which model, tokens that it has just read, and seconds it has read so far."""


@dataclass(frozen=True, eq=False)
class Captured:
    """One batch of texts with both models' KV and the rows they pair."""

    texts: TextBatch
    sender: Batch
    receiver: Batch
    pairing: Pairing


class PairSource:
    """Captures documents batch by batch. Test batches are kept back (as texts, or as spilled rows)
    until `held`.

    `exact` of `covered` receiver tokens so far end where a sender token ends; `rows` counts rows
    per split, and `left_out` those whose text another split saw first.
    """

    def __init__(
        self,
        sender: Model,
        receiver: Model,
        config: FitConfig,
        hidden: int,
        device: torch.device,
        clock: Clock,
        progress: FitProgress,
    ) -> None:
        self.sender, self.receiver, self.config = sender, receiver, config
        self.hidden, self.device = hidden, device
        self.clock, self.progress = clock, progress
        self._spilled = False
        self.exact, self.covered = 0.0, 0
        self.rows: dict[str, int] = {}
        self.left_out: dict[str, int] = {}
        self._held: list[tuple[TextBatch, Callable[[], Batch]]] = []

    def captured(
        self, documents: Iterable[tuple[str, Document]], store: Spill | None
    ) -> Iterator[Captured]:
        """Train and validation batches, in order. With a store the sender reads every text first,
        while the receiver is off the accelerator, and the other way round."""
        batches = text_batches(self.sender, self.receiver, documents, self.config)
        self._spilled = store is not None
        if store is None:
            yield from self._paired((batch, partial(self._run_sender, batch)) for batch in batches)
            return
        spilled: list[tuple[TextBatch, Callable[[], Batch]]] = []
        with self._alone(self.sender, self.receiver):
            for batch in batches:
                spilled.append((batch, partial(store.read, store.count)))
                store.append(self._run_sender(batch))
        with self._alone(self.receiver, self.sender):
            yield from self._paired(spilled)

    def held(self) -> Iterator[Captured]:
        """The test batches."""
        kept, self._held = self._held, []
        # Spilled rows were made so that the models need not be there together: nor are they now.
        with self._alone(self.receiver, self.sender) if self._spilled else nullcontext():
            for batch, load in kept:
                yield self._pair(batch, load())

    @contextmanager
    def _alone(self, runs: Model, waits: Model) -> Iterator[None]:
        """`runs` on the device while `waits` is in host memory."""
        with placed(waits, torch.device("cpu")), placed(runs, self.device):
            yield

    def _paired(
        self, sources: Iterable[tuple[TextBatch, Callable[[], Batch]]]
    ) -> Iterator[Captured]:
        for batch, load in sources:
            if batch.split == "test":
                self._held.append((batch, load))
            else:
                yield self._pair(batch, load())

    def _run_sender(self, batch: TextBatch) -> Batch:
        tokens = sum(len(e) for e in batch.sender)
        with self.clock.part("forward_sender", tokens=tokens):
            captured = capture_batch(self.sender, batch.sender)
        self.progress("sender", tokens, self.clock.seconds["forward_sender"])
        return captured

    def _pair(self, batch: TextBatch, sender: Batch) -> Captured:
        with self.clock.part("forward_receiver", tokens=batch.tokens):
            receiver = capture_batch(self.receiver, batch.receiver, hidden_layer=self.hidden)
        self.progress("receiver", batch.tokens, self.clock.seconds["forward_receiver"])
        widths = (sender.mask.shape[1], receiver.mask.shape[1])
        pairing = pair_rows(self.sender, self.receiver, batch, self.config, widths)
        self.exact, self.covered = self.exact + pairing.exact, self.covered + pairing.covered
        split = batch.split
        self.rows[split] = self.rows.get(split, 0) + len(pairing.receiver)
        self.left_out[split] = self.left_out.get(split, 0) + pairing.left_out
        return Captured(batch, sender, receiver, pairing)


def seen_elsewhere(source: PairSource) -> str:
    """The end of a sentence about too few rows: how many were another split's; else nothing."""
    if not (left_out := sum(source.left_out.values())):
        return ""
    return (
        f"; {left_out:,} rows were left out because their text up to there also begins documents "
        "of another split: give more documents that begin differently, or more of each (max_tokens)"
    )


@contextmanager
def placed(model: Model, device: torch.device) -> Iterator[None]:
    """Inside the block the model's weights are on `device`; they go back to where they were at its
    end."""
    before = model.device
    if before == device:
        yield
        return
    _move(model, device)
    try:
        yield
    finally:
        _move(model, before)


def _move(model: Model, device: torch.device) -> None:
    model.model.to(device)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
