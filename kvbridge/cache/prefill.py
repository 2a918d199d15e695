"""Running a model over texts and taking its KV: one request as a snapshot, or batches as rows for a
fit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from kvbridge.cache.run import recorded_at, run_decoder
from kvbridge.cache.snapshot import KVSnapshot, snapshot_of_cache
from kvbridge.cache.spelling import Said
from kvbridge.errors import UsageError
from kvbridge.model.arguments import check_vocabulary, expect, text_of, token_ids
from kvbridge.model.chat import Messages, TemplateOptions
from kvbridge.model.model import Model
from kvbridge.model.probe import cached_layers
from kvbridge.model.text import Encoding


@torch.no_grad()
def capture(
    model: Model,
    text: str | None = None,
    *,
    input_ids: Tensor | None = None,
    messages: Messages | None = None,
    template: TemplateOptions | None = None,
) -> KVSnapshot:
    """Prefills `model` over exactly one of text, input_ids `[tokens]` or messages.

    Messages become exactly the ids of the model's own `apply_chat_template`, with the generation
    prompt; `template` holds what that takes besides (`tools`, `documents`, `enable_thinking`,
    `continue_final_message`, any variable of the template). Every layer keeps its full length,
    sliding ones too. Raises UsageError on none or several of the three, what the template cannot
    render, an empty text, or more tokens than the model has positions.
    """
    if sum(x is not None for x in (text, input_ids, messages)) != 1:
        raise UsageError("expected exactly one of text, input_ids and messages")
    expect(model, Model, "a model as made by kvbridge.load")
    if template is not None and messages is None:
        raise UsageError("template= says how messages= are rendered; give both or neither")
    vocabulary = model.geometry.vocabulary
    chat = None if messages is None else model.chat(messages, template)
    if chat is not None:
        ids = check_vocabulary(chat.encoding.ids, vocabulary, model.name)
    elif text is not None:
        ids = check_vocabulary(model.encode(text_of(text)).ids, vocabulary, model.name)
    else:
        ids = token_ids(input_ids, vocabulary)
    if len(ids) == 0:
        raise UsageError("expected at least one token, found an empty text")
    if len(ids) > model.geometry.max_positions:
        raise UsageError(
            f"{len(ids)} tokens are more than the {model.geometry.max_positions} positions of "
            f"{model.name}"
        )
    cache = DynamicCache()
    run_decoder(model, ids[None], cache=cache)
    return snapshot_of_cache(cache, model, ids, Said(text, chat))


@dataclass(frozen=True)
class Batch:
    """KV of several texts in content space, padded at the end.

    `layers[i][stream]` `[batch, tokens, heads, width]` fp32; `mask` `[batch, tokens]` True on real
    tokens; `hidden` `[batch, tokens, hidden]` fp32: what enters layer `hidden_layer`, where it was
    asked for.
    """

    layers: list[dict[str, Tensor]]
    mask: Tensor
    hidden: Tensor | None


@torch.no_grad()
def capture_batch(
    model: Model, encodings: Sequence[Encoding], *, hidden_layer: int | None = None
) -> Batch:
    """One forward of the decoder over padded texts, in the model's dtype; RoPE is then removed."""
    longest = max(len(e) for e in encodings)
    ids = torch.zeros((len(encodings), longest), dtype=torch.int64)
    mask = torch.zeros((len(encodings), longest), dtype=torch.bool)
    for row, encoding in enumerate(encodings):
        ids[row, : len(encoding)] = encoding.ids
        mask[row, : len(encoding)] = True
    cache = DynamicCache()
    asked = nullcontext() if hidden_layer is None else recorded_at(model.layers[hidden_layer])
    with asked as entered:
        run_decoder(
            model,
            ids,
            cache=cache,
            attention_mask=mask.long(),
            position_ids=torch.arange(longest).expand_as(ids),
        )
    positions = torch.arange(longest)
    layers = []
    for index, (k, v) in enumerate(cached_layers(cache)):
        keys = model.rotation.unrotate(k.transpose(1, 2), positions, index)
        layers.append({"k": keys, "v": v.transpose(1, 2).float()})
    return Batch(layers, mask.to(model.device), entered[0].float() if entered else None)
