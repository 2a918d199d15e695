"""Finished maps on the test documents: R², and attention outputs with the receiver's queries."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbridge.asset.maps.translator import Translator
from kvbridge.cache.prefill import Batch
from kvbridge.errors import DataError
from kvbridge.fitting.clock import Clock
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.pairs import Captured, PairSource, seen_elsewhere
from kvbridge.fitting.rows import TextBatch, pair_rows
from kvbridge.fitting.scores import Residuals, Scores, attention_cosine
from kvbridge.fitting.train import MapSet
from kvbridge.model.model import Model


def score_maps(maps: MapSet, control: Translator, source: PairSource, clock: Clock) -> Scores:
    """Scores of the maps and of their token-only `control` on the batches that `source` kept back,
    on the same rows.

    Raises DataError where those hold no rows.
    """
    translator, control = maps.translator.to(source.device), control.to(source.device)
    receiver, config = source.receiver, source.config
    residuals, floor = Residuals(receiver.geometry), Residuals(receiver.geometry)
    cosines: dict[int, list[float]] = {}
    documents, left = 0, config.cosine_documents
    for pair in source.held():
        documents += len(pair.texts.documents)
        if not len(pair.pairing.receiver):
            continue
        with clock.part("scores"):
            rows = (pair.pairing.sender, pair.pairing.receiver)
            at = pair.pairing.receiver.to(pair.receiver.mask.device)
            target = {
                (layer, name): pair.receiver.layers[layer][name].flatten(0, 1)[at]
                for layer in translator.layers
                for name in pair.receiver.layers[layer]
            }
            for sums, map_ in ((residuals, translator), (floor, control)):
                sums.update(target, map_(*_inputs(map_, pair.sender, pair.receiver, *rows)))
            for number in range(min(left, len(pair.texts.documents))):
                for layer, value in _cosine(
                    translator, source.sender, receiver, pair, number, config.sinks
                ).items():
                    cosines.setdefault(layer, []).append(value)
            left -= min(left, len(pair.texts.documents))
    if residuals.rows < 2:
        raise DataError(
            f"expected rows to score on, found {residuals.rows} in {documents} test documents"
            f"{seen_elsewhere(source)}"
        )
    means = [
        sum(c) / len(c) if (c := cosines.get(layer)) else None
        for layer in range(len(receiver.layers))
    ]
    return Scores(
        residuals.r2(), means, residuals.rows, documents, maps.single_layer_r2, floor.r2()
    )


def _cosine(
    translator: Translator, sender: Model, receiver: Model, pair: Captured, number: int, sinks: int
) -> dict[int, float]:
    """Attention-output cosines of one document of a batch; uncovered tokens keep the receiver's own
    KV."""
    texts = pair.texts
    widths = (pair.sender.mask.shape[1], pair.receiver.mask.shape[1])
    one = TextBatch(
        texts.split, (texts.documents[number],), (texts.sender[number],), (texts.receiver[number],)
    )
    count = len(one.receiver[0])
    first = _first_own(texts, number, sinks)
    if first >= count:
        return {}
    every = pair_rows(sender, receiver, one, FitConfig(sinks=0), widths)
    flat = (number * widths[0] + every.sender, number * widths[1] + every.receiver)
    translated = translator(*_inputs(translator, pair.sender, pair.receiver, *flat))
    positions = torch.arange(count)
    for layer, streams in translated.items():
        for name, value in streams.items():
            own = pair.receiver.layers[layer][name][number, :count].clone()
            own[every.receiver.to(own.device)] = value.to(own)
            streams[name] = receiver.rotation.rotate(own, positions, layer) if name == "k" else own
    return attention_cosine(receiver, one.receiver[0].ids, translated, sinks, first)


def _first_own(texts: TextBatch, number: int, sinks: int) -> int:
    """The first token after the sinks from which on a document's text is the split's own; its
    length where there is none."""
    count = len(texts.receiver[number])
    if texts.own is None or count <= sinks:
        return min(sinks, count)
    others = (~texts.own[number][sinks:]).nonzero()[:, 0]
    return sinks if len(others) == 0 else sinks + int(others[-1]) + 1


def _inputs(
    translator: Translator,
    sender: Batch,
    receiver: Batch,
    sender_rows: Tensor,
    receiver_rows: Tensor,
) -> tuple[dict[int, dict[str, Tensor]], Tensor | None]:
    """Aligned rows of captured batches as a translator takes them; rows are flat row numbers of the
    padded batches."""
    device = receiver.mask.device
    content = {
        layer: {
            n: t.flatten(0, 1)[sender_rows.to(t.device)].float().to(device)
            for n, t in sender.layers[layer].items()
        }
        for layer in translator.sender_layers
    }
    features = None
    if receiver.hidden is not None and translator.receiver_features != "none":
        features = receiver.hidden.flatten(0, 1)[receiver_rows.to(device)]
    return content, features
