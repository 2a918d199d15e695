"""What can be said of a pair before a translator is fitted, from a few sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvbridge.cache.prefill import capture_batch
from kvbridge.errors import EvalError
from kvbridge.eval.report.display import PREDICTOR_WORDS
from kvbridge.eval.screen.similarity import canonical_correlations, linear_cka, r2_over_tokens
from kvbridge.eval.tasks.start import forward
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.data import Document
from kvbridge.fitting.rows import TextBatch, pair_rows
from kvbridge.fitting.select import relative_order
from kvbridge.model.beginning import encode_beginning
from kvbridge.model.model import Model

SEQUENCE_TOKENS = 256
PREDICTOR_ROWS = 1200
PREDICTORS = tuple(PREDICTOR_WORDS)


@torch.no_grad()
def predictors(sender: Model, receiver: Model, documents: Sequence[Document]) -> dict[str, float]:
    """What can be said of a pair before fitting, from a few documents.

    `end_match`: share of receiver token ends that a sender token end meets. `loss_gap`: sender's
    minus receiver's own loss in nats per character (above 0: the receiver is the better model).
    `cka`: debiased linear CKA of each receiver layer's K and V with the most similar sender
    layer's, averaged; `cca`: mean canonical correlation of these same pairs of layers (in-sample:
    unrelated layers score above 0, too; NaN with too few tokens). `r2_tokens`: held-out R² of three
    receiver layers from the receiver's embeddings alone; `r2_gain`: what the nearest sender layer
    adds to it.
    """
    if len(documents) < 4:
        raise EvalError(f"expected at least 4 documents to predict from, found {len(documents)}")
    config = FitConfig(max_tokens=SEQUENCE_TOKENS)
    read = [encode_beginning(sender, d.text, SEQUENCE_TOKENS) for d in documents]
    to_read = [encode_beginning(receiver, d.text, SEQUENCE_TOKENS) for d in documents]
    giving = capture_batch(sender, read)
    taking = capture_batch(receiver, to_read, hidden_layer=0)
    batch = TextBatch("train", tuple(documents), tuple(read), tuple(to_read))
    widths = (giving.mask.shape[1], taking.mask.shape[1])
    pairing = pair_rows(sender, receiver, batch, config, widths)
    step = max(1, len(pairing.sender) // PREDICTOR_ROWS)
    sender_rows, receiver_rows = pairing.sender[::step], pairing.receiver[::step]
    groups = [documents[int(row) // widths[1]].group for row in receiver_rows]
    sender_depth, receiver_depth = len(sender.layers), len(receiver.layers)
    assert taking.hidden is not None
    tokens = _rows(taking.hidden[:, :, None], receiver_rows)
    similar, correlated = [], []
    for layer in range(receiver_depth):
        for name in ("k", "v"):
            target = _rows(taking.layers[layer][name], receiver_rows)
            alike = [
                linear_cka(_rows(giving.layers[i][name], sender_rows), target)
                for i in range(sender_depth)
            ]
            nearest = _rows(giving.layers[int(np.argmax(alike))][name], sender_rows)
            similar.append(max(alike))
            correlated.append(_mean_correlation(nearest, target))
    alone, gains = [], []
    # Three depths stand for the whole: solving them all would take as long as a fit.
    depths = {receiver_depth // 4, receiver_depth // 2, (3 * receiver_depth) // 4}
    for layer in sorted(depths):
        near = relative_order(sender_depth, layer / max(1, receiver_depth - 1))[0]
        for name in ("k", "v"):
            block = _rows(giving.layers[near][name], sender_rows)
            target = _rows(taking.layers[layer][name], receiver_rows)
            base, both = r2_over_tokens(block, tokens, target, groups)
            alone.append(base)
            gains.append(both - base)
    return {
        "end_match": pairing.exact / max(1, pairing.covered),
        "loss_gap": loss_per_character(sender, documents) - loss_per_character(receiver, documents),
        "cka": float(np.mean(similar)),
        "cca": float(np.mean(correlated)),
        "r2_tokens": float(np.mean(alone)),
        "r2_gain": float(np.mean(gains)),
    }


def _mean_correlation(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
    """Mean canonical correlation; NaN where there are too few rows for one."""
    try:
        correlations = canonical_correlations(x, y)
    except EvalError:
        return float("nan")
    return float(correlations.mean()) if len(correlations) else float("nan")


@torch.no_grad()
def loss_per_character(model: Model, documents: Sequence[Document]) -> float:
    """The model's own nats per character over the first tokens of each document."""
    nats, characters = 0.0, 0
    for document in documents:
        encoding = encode_beginning(model, document.text, SEQUENCE_TOKENS)
        logits = forward(model, encoding.ids[None, :-1], DynamicCache(), 0)[0].float()
        target = encoding.ids[1:].to(logits.device)
        nats -= float(logits.log_softmax(-1).gather(1, target[:, None]).double().sum())
        characters += int(encoding.spans[-1, 1] - encoding.spans[0, 1])
    return nats / max(1, characters)


def _rows(tensor: torch.Tensor, at: torch.Tensor) -> np.ndarray[Any, Any]:
    """Rows `at` of `[batch, tokens, heads, width]` as `[rows, features]`."""
    return tensor.flatten(2).flatten(0, 1)[at.to(tensor.device)].double().cpu().numpy()
