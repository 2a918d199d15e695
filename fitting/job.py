"""A fit from two models and texts to a translator with held-out scores: one pass over the data, then algebra."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbridge.errors import DataError, NotEnoughRows, PairRefused, UsageError
from kvbridge.features import hidden_layer
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.data import SPLITS, Document, Splits, read_documents, split_of
from kvbridge.fitting.memory import MemoryPlan, check_memory, control_features, plan_layout
from kvbridge.fitting.moments import Moments
from kvbridge.fitting.rows import Pairing, TextBatch, input_rows, pair_rows, target_rows, text_batches
from kvbridge.fitting.scores import Residuals, Scores, attention_cosine
from kvbridge.fitting.spill import Spill, spill
from kvbridge.fitting.train import MapSet, largest_map, solve_controls, solve_maps
from kvbridge.models import Model
from kvbridge.prefill import Batch, capture_batch
from kvbridge.translator import Translator

FORCED = "fitted with --force on fewer rows than twice the features: held-out scores may be far below zero"
Progress = Callable[[str, int, float], None]


@dataclass(frozen=True, eq=False)
class Fit:
    """A finished fit: the translator, its token-only control, test-split scores and where the time went."""

    translator: Translator
    controls: Translator | None
    scores: Scores
    timings: dict[str, float]
    config: FitConfig
    lambdas: dict[str, float]
    jitter: dict[str, float]
    corpus_digest: str
    splits: dict[str, dict[str, int]]
    marks: tuple[str, ...]
    alignment_exact_share: float


class Clock:
    """Seconds per named part."""

    def __init__(self, *devices: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._cuda = [d for d in devices if d.type == "cuda"]
        self._start = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the block's wall time to `name`, waiting for the devices."""
        start = time.perf_counter()
        try:
            yield
        finally:
            for device in self._cuda:
                torch.cuda.synchronize(device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def timings(self) -> dict[str, float]:
        """Seconds per part, the total, its ratio to the two forward passes, and peak bytes."""
        total = time.perf_counter() - self._start
        names = ("forward_sender", "forward_receiver", "moments", "solve", "scores")
        found = {f"{name}_s": self.seconds.get(name, 0.0) for name in names}
        forward = found["forward_sender_s"] + found["forward_receiver_s"]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self._cuda:
            peak = max(torch.cuda.max_memory_allocated(d) for d in self._cuda)
        return {
            **found,
            "total_s": total,
            "ratio_to_forward": total / max(forward, 1e-9),
            "peak_bytes": float(peak),
        }


def fit(
    sender: Model | Callable[[], Model],
    receiver: Model | Callable[[], Model],
    texts: Any,
    *,
    config: FitConfig | None = None,
    progress: Progress | None = None,
    on_plan: Callable[[MemoryPlan], None] | None = None,
) -> Fit:
    """Fits a translator from `sender` to `receiver` on `texts` (a path, a Hub dataset id, or strings, mappings, Documents).

    Loaded models, or functions that load them (with `one_at_a_time` the sender is then dropped before the receiver
    captures). `progress(part, tokens, seconds)` is called per batch, `on_plan` with the memory plan before anything
    runs. Raises DataError, NotEnoughRows, OverBudget, PairRefused or UsageError; nothing is written.
    """
    config = config or FitConfig()
    return _Job(sender, receiver, config, progress or (lambda *_: None), on_plan or (lambda _: None)).run(texts)


class _Job:
    def __init__(self, sender: Any, receiver: Any, config: FitConfig, progress: Progress, on_plan: Any) -> None:
        self.config, self.progress, self.on_plan = config, progress, on_plan
        self.sender = sender if isinstance(sender, Model) else sender()
        self._load_receiver = (lambda: receiver) if isinstance(receiver, Model) else receiver
        self.receiver: Model = receiver if isinstance(receiver, Model) else receiver()
        if self.sender is self.receiver or self.sender.geometry.digest == self.receiver.geometry.digest:
            raise UsageError("sender and receiver are the same model: its cache needs no translation")
        depth = len(self.receiver.layers)
        wanted = hidden_layer(config.receiver_features)
        if wanted is not None and wanted >= depth:
            raise UsageError(f"hidden:{wanted} needs a receiver of more than {wanted} layers, found {depth}")
        self.hidden = hidden_layer(control_features(config.receiver_features))
        self.layout = plan_layout(self.sender.geometry, self.receiver.geometry, config)
        self.splits = Splits()
        self.clock = Clock(self.sender.device, self.receiver.device)
        self.exact, self.covered = 0.0, 0

    def run(self, texts: Any) -> Fit:
        config, device = self.config, self.receiver.device
        self.on_plan(check_memory(self.sender.geometry, self.receiver.geometry, config, device))
        moments = {s: Moments(self.layout, device=device, precision=config.precision) for s in SPLITS[:2]}
        test: list[tuple[str, Document]] = []
        with ExitStack() as stack:
            store = (
                stack.enter_context(spill(config.spill_folder, config.spill_bytes, self._spill_dtype()))
                if config.one_at_a_time
                else None
            )
            for batch, sender, receiver, pairing in self._captured(self._streamed(texts, test), store):
                with self.clock.part("moments"):
                    x = input_rows(self.layout, sender, receiver.hidden, pairing)
                    moments[batch.split].update(x, target_rows(self.layout, receiver, pairing))
            self.splits.check()
            self._check_rows(moments)
            with self.clock.part("solve"):
                maps = solve_maps(
                    self.sender.geometry,
                    self.receiver.geometry,
                    moments["train"],
                    moments["validation"],
                    config,
                )
                controls = solve_controls(
                    self.sender.geometry,
                    self.receiver.geometry,
                    moments["train"],
                    moments["validation"],
                    config,
                )
            del moments
            scores = self._scores(maps, test)
        marks = (FORCED,) if maps.starved and config.force else ()
        return Fit(
            maps.translator,
            controls.translator,
            scores,
            self.clock.timings(),
            config,
            maps.lambdas,
            maps.jitter,
            self.splits.digest,
            self.splits.to_json(),
            marks,
            round(self.exact / max(1, self.covered), 6),
        )

    def _spill_dtype(self) -> torch.dtype:
        return self.sender.dtype

    def _streamed(self, texts: Any, test: list[tuple[str, Document]]) -> Iterator[tuple[str, Document]]:
        """Train and validation documents as they come; test documents are kept for the end."""
        for document in read_documents(texts):
            split = split_of(document, self.config.fractions)
            self.splits.add(document, split)
            if split == "test":
                test.append((split, document))
            else:
                yield split, document

    def _captured(
        self, documents: Iterable[tuple[str, Document]], store: Spill | None
    ) -> Iterator[tuple[TextBatch, Batch, Batch, Pairing]]:
        """Both models' KV per batch: side by side, or the sender's from disk once it has read everything."""
        batches = text_batches(self.sender, self.receiver, documents, self.config)
        if store is None:
            for batch in batches:
                yield self._paired(batch, self._run_sender(batch))
            return
        kept = []
        start = store.count
        for batch in batches:
            store.append(self._run_sender(batch))
            kept.append(batch)
        self._park(self.sender)
        for number, batch in enumerate(kept):
            yield self._paired(batch, store.read(start + number))
        self._unpark(self.sender)

    def _park(self, model: Model) -> None:
        """Takes the sender off an accelerator while the receiver runs."""
        self._sender_device = model.device
        if model.device.type != "cpu":
            model.model.to("cpu")
            torch.cuda.empty_cache()

    def _unpark(self, model: Model) -> None:
        if model.device != self._sender_device:
            model.model.to(self._sender_device)

    def _run_sender(self, batch: TextBatch) -> Batch:
        with self.clock.part("forward_sender"):
            found = capture_batch(self.sender, batch.sender)
        self.progress("sender", sum(len(e) for e in batch.sender), self.clock.seconds["forward_sender"])
        return found

    def _paired(self, batch: TextBatch, sender: Batch) -> tuple[TextBatch, Batch, Batch, Pairing]:
        with self.clock.part("forward_receiver"):
            receiver = capture_batch(self.receiver, batch.receiver, hidden_layer=self.hidden)
        self.progress("receiver", batch.tokens, self.clock.seconds["forward_receiver"])
        widths = (sender.mask.shape[1], receiver.mask.shape[1])
        pairing = pair_rows(self.sender, self.receiver, batch, self.config, widths)
        self.exact, self.covered = self.exact + pairing.exact, self.covered + pairing.covered
        self.splits.rows[batch.split] += len(pairing.receiver)
        return batch, sender, receiver, pairing

    def _check_rows(self, moments: dict[str, Moments]) -> None:
        share = self.exact / max(1, self.covered)
        if share < self.config.min_exact_share:
            raise PairRefused(
                f"only {share:.1%} of the receiver's tokens end where a sender's token ends (expected {self.config.min_exact_share:.0%}); "
                "these tokenizers cut text too differently (--min-exact-share to go on)"
            )
        if moments["validation"].n < 2 or moments["train"].n < 2:
            raise DataError(
                f"expected rows to fit and validate on, found {moments['train'].n} and {moments['validation'].n}"
            )
        features = largest_map(self.sender.geometry, self.receiver.geometry, self.config)
        rows = moments["train"].n
        if rows < 2 * features and not self.config.force:
            per_row = self.config.stride
            raise NotEnoughRows(
                f"{rows} training rows for maps of {features} inputs: expected at least {2 * features} rows "
                f"(about {2 * features * per_row:,} tokens of training text); give more text, fewer --layers, or --force to go on"
            )

    def _scores(self, maps: MapSet, test: list[tuple[str, Document]]) -> Scores:
        """R² from residuals on the test documents, and attention-output cosines on the first few."""
        translator = maps.translator
        residuals = Residuals(self.receiver.geometry)
        cosines: dict[int, list[float]] = {layer: [] for layer in translator.layers}
        left = self.config.cosine_documents
        for batch, sender, receiver, pairing in self._captured(iter(test), None):
            with self.clock.part("scores"):
                found = translator(*_translator_inputs(translator, sender, receiver, pairing.sender, pairing.receiver))
                at = pairing.receiver.to(self.receiver.device)
                target = {
                    (layer, name): receiver.layers[layer][name].flatten(0, 1)[at] for layer, name in translator.maps
                }
                residuals.update(target, found)
                for number in range(min(left, len(batch.documents))):
                    for layer, value in self._cosine(translator, batch, sender, receiver, number).items():
                        cosines[layer].append(value)
                left -= min(left, len(batch.documents))
        if residuals.rows < 2:
            raise DataError(f"expected rows to score on, found {residuals.rows} in {len(test)} test documents")
        means = [
            sum(cosines[i]) / len(cosines[i]) if cosines.get(i) else None for i in range(len(self.receiver.layers))
        ]
        return Scores(residuals.r2(), means, residuals.rows, len(test), maps.single_layer_r2)

    def _cosine(
        self, translator: Translator, batch: TextBatch, sender: Batch, receiver: Batch, number: int
    ) -> dict[int, float]:
        """Attention-output cosines of one document of a batch; uncovered tokens keep the receiver's own KV."""
        widths = (sender.mask.shape[1], receiver.mask.shape[1])
        one = TextBatch(batch.split, (batch.documents[number],), (batch.sender[number],), (batch.receiver[number],))
        count = len(one.receiver[0])
        if count <= self.config.sinks:
            return {}
        every = pair_rows(self.sender, self.receiver, one, FitConfig(sinks=0), widths)
        rows = every.receiver
        found = translator(
            *_translator_inputs(
                translator, sender, receiver, number * widths[0] + every.sender, number * widths[1] + rows
            )
        )
        positions = torch.arange(count)
        for layer, streams in found.items():
            for name, value in streams.items():
                own = receiver.layers[layer][name][number, :count].clone()
                own[rows.to(own.device)] = value.to(own)
                streams[name] = self.receiver.rotation.rotate(own, positions, layer) if name == "k" else own
        return attention_cosine(self.receiver, one.receiver[0].ids, found, self.config.sinks)


def _translator_inputs(
    translator: Translator, sender: Batch, receiver: Batch, rows: Tensor, receiver_rows: Tensor
) -> tuple[dict[int, dict[str, Tensor]], Tensor | None]:
    """Aligned rows of captured batches as a translator takes them; `rows` and `receiver_rows` are flat row numbers."""
    device = receiver.mask.device
    content = {
        layer: {n: t.flatten(0, 1)[rows.to(t.device)].float().to(device) for n, t in sender.layers[layer].items()}
        for layer in translator.sender_layers
    }
    features = None
    if receiver.hidden is not None and translator.receiver_features != "none":
        features = receiver.hidden.flatten(0, 1)[receiver_rows.to(device)]
    return content, features
