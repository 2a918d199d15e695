"""The engine over a loaded transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvbridge.cache.features import FirstLayers, first_layers, noted
from kvbridge.cache.layers import LayerKV, build_cache
from kvbridge.cache.prefill import capture
from kvbridge.cache.recompute import recompute
from kvbridge.engines.generate import generate, generate_many
from kvbridge.engines.port import Decoded, Engine, Prefilled, Recomputed
from kvbridge.errors import UsageError
from kvbridge.geometry import KVGeometry
from kvbridge.model.chat import Chat, Messages, TemplateOptions
from kvbridge.model.model import Model
from kvbridge.model.probe import cache_argument
from kvbridge.model.queries import recorded_queries
from kvbridge.model.rope import Rotation
from kvbridge.model.text import Encoding


@dataclass(frozen=True, eq=False)
class TransformersEngine:
    """The port of `engines.port` over `model`, which is used as it is."""

    model: Model

    @property
    def name(self) -> str:
        """What it was loaded from."""
        return self.model.name

    @property
    def geometry(self) -> KVGeometry:
        """The model's."""
        return self.model.geometry

    @property
    def rotation(self) -> Rotation:
        """The model's."""
        return self.model.rotation

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and cache."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    def changed(self) -> str | None:
        """As of Model."""
        return self.model.changed()

    def encode(self, text: str) -> Encoding:
        """As of Model."""
        return self.model.encode(text)

    def encode_ids(self, token_ids: Tensor) -> tuple[str, Encoding]:
        """As of Model."""
        return self.model.encode_ids(token_ids)

    def chat(self, messages: Messages, template: TemplateOptions | None = None) -> Chat:
        """As of Model."""
        return self.model.chat(messages, template)

    def spell(self, token_ids: Tensor) -> str:
        """The tokenizer's decoding, special tokens left out."""
        return self.model.tokenizer.decode(token_ids, skip_special_tokens=True)

    def prefill(self, ids: Tensor) -> list[LayerKV]:
        """One forward; sliding layers keep their full length."""
        return list(capture(self.model, input_ids=ids).layers)

    @torch.no_grad()
    def decode(self, ids: Tensor, layers: list[LayerKV]) -> Decoded:
        """One forward over a transformers cache of `layers`."""
        start = len(layers[0]["k"])
        cache = build_cache(self.model, layers) if start else DynamicCache()
        with noted(cache) as rows:
            output = self.model.model(
                input_ids=ids[None].to(self.device),
                position_ids=torch.arange(start, start + len(ids), device=self.device)[None],
                attention_mask=torch.ones((1, start + len(ids)), device=self.device).long(),
                use_cache=True,
                **cache_argument(self.model.model, cache),
            )
        grown = [
            {name: torch.cat((tensor, new[name])) for name, tensor in layer.items()}
            for layer, new in zip(layers, rows, strict=True)
        ]
        return Decoded(output.logits[0].float(), grown)

    def generate(
        self, prompt: Prefilled, max_new_tokens: int | None = None, **options: Any
    ) -> Tensor:
        """`transformers.generate`, with every option it has."""
        return generate(self.model, prompt, max_new_tokens, options)

    def generate_many(
        self, prompts: Sequence[Prefilled], max_new_tokens: int | None = None, **options: Any
    ) -> list[Tensor]:
        """The same in one batch, padded on the left; prompts without rows go one by one."""
        return generate_many(self.model, prompts, max_new_tokens, options)

    def first_layers(
        self,
        ids: Tensor,
        count: int,
        *,
        entering: int | None = None,
        past: Sequence[LayerKV] = (),
    ) -> FirstLayers:
        """The KV of a whole prompt's first layers is bit-equal to a full forward's."""
        return first_layers(self.model, ids, count, entering=entering, past=past)

    def repair(
        self,
        ids: Tensor,
        layers: list[LayerKV],
        chosen: Tensor,
        *,
        following: Tensor | None = None,
        record_queries: bool = False,
    ) -> Recomputed:
        """One forward of the chosen and the following tokens; `layers` is modified."""
        if not record_queries:
            states = recompute(self.model, ids, layers, chosen, following=following)
            return Recomputed(states, None)
        with recorded_queries(self.model) as queries:
            states = recompute(self.model, ids, layers, chosen, following=following)
        return Recomputed(states, queries)


def engine_of(model: Model | Engine) -> Engine:
    """The engine that runs `model`: itself where it is one. Raises UsageError for anything else."""
    if isinstance(model, Model):
        return TransformersEngine(model)
    if isinstance(model, Engine):
        return model
    raise UsageError(
        f"expected a model as made by kvbridge.load, or an engine, found {type(model).__name__}"
    )
