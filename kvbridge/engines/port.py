"""What a bridge expects of whatever runs a model: one protocol, so that a second engine is one
file.

Tokens are `[tokens]` int64 on the CPU, cached rows `[tokens, heads, width]` per layer and stream,
as the model caches them (keys rotated), on the engine's device and in its dtype. Nothing but the
argument that a method names as modified is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvbridge.cache.features import FirstLayers
from kvbridge.cache.provenance import Provenance
from kvbridge.cache.snapshot import LayerKV
from kvbridge.geometry import KVGeometry
from kvbridge.model.chat import Chat, Messages, TemplateOptions
from kvbridge.model.rope import Rotation
from kvbridge.model.text import Encoding


class RecordedQueries(Protocol):
    """Attention queries of one forward."""

    def at(self, layer: int, rows: Tensor, positions: Tensor) -> Tensor | None:
        """Queries `[n, query heads, width]` fp32 of the forward's tokens `rows` `[n]`, which stand
        at `positions` `[n]`: rotated and scaled, so that their dot product with a cached key is the
        attention logit. None where this layer's attention is no plain softmax of them."""
        ...


@dataclass(frozen=True, eq=False)
class Recomputed:
    """What a repair tells besides the rows it wrote: `states` `[n + m, hidden]` that leave the last
    layer for the chosen and the following tokens (None where nothing ran), and their `queries`
    (None unless they were asked for)."""

    states: Tensor | None
    queries: RecordedQueries | None


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A prompt to go on from: ids `[tokens]`, the rows of all but the last (`layers`; None: of
    none), and where those are from, for the cache to remember (None: the model's own)."""

    ids: Tensor
    layers: list[LayerKV] | None
    provenance: Provenance | None = None


@dataclass(frozen=True, eq=False)
class Decoded:
    """`logits` `[n, vocabulary]` fp32 after each token that ran, and every layer's rows
    `[tokens + n, heads, width]` with theirs."""

    logits: Tensor
    layers: list[LayerKV]


@runtime_checkable
class Engine(Protocol):
    """A model that can be handed a conversation, or whose conversation is handed over."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def model(self) -> Any:
        """What users see of it as sender or receiver: a `kvbridge.Model`, else the engine
        itself."""
        ...

    @property
    def geometry(self) -> KVGeometry:
        """The contract of its cache."""
        ...

    @property
    def rotation(self) -> Rotation:
        """Its RoPE: between keys as cached and content space."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of cached rows."""
        ...

    @property
    def device(self) -> torch.device:
        """Where cached rows are."""
        ...

    def changed(self) -> str | None:
        """What is no longer as `geometry` says, in a few words; None where all is."""
        ...

    def encode(self, text: str) -> Encoding:
        """Token ids and character spans of a text."""
        ...

    def encode_ids(self, token_ids: Tensor) -> tuple[str, Encoding]:
        """The text that ids `[tokens]` spell, and where each of them ends in it."""
        ...

    def chat(self, messages: Messages, template: TemplateOptions | None = None) -> Chat:
        """The prompt of a chat and where each message stands in it; `template` holds what its
        template takes besides messages. Raises UsageError where there is no template for one."""
        ...

    def spell(self, token_ids: Tensor) -> str:
        """The text of ids `[tokens]`, special tokens left out."""
        ...

    def prefill(self, ids: Tensor) -> list[LayerKV]:
        """Every layer's rows of ids `[tokens]` from position 0."""
        ...

    def decode(self, ids: Tensor, layers: list[LayerKV]) -> Decoded:
        """Runs ids `[n]` (n ≥ 1) after the tokens whose rows are `layers`; none: `[0, heads,
        width]`."""
        ...

    def generate(
        self, prompt: Prefilled, max_new_tokens: int | None = None, **options: Any
    ) -> Tensor:
        """Continues a prompt: it and what follows, `[sequences, tokens]`. Raises UsageError for an
        empty one and for options that the engine does not know."""
        ...

    def generate_many(
        self, prompts: Sequence[Prefilled], max_new_tokens: int | None = None, **options: Any
    ) -> list[Tensor]:
        """The same of several prompts, one sequence `[tokens]` each."""
        ...

    def first_layers(
        self,
        ids: Tensor,
        count: int,
        *,
        entering: int | None = None,
        past: Sequence[LayerKV] = (),
    ) -> FirstLayers:
        """Runs layers 0..count−1 over ids `[tokens]` after the rows `past`, and no further: their
        rows of these tokens, and what enters layer `entering` (0 to count, by default count)."""
        ...

    def repair(
        self,
        ids: Tensor,
        layers: list[LayerKV],
        chosen: Tensor,
        *,
        following: Tensor | None = None,
        record_queries: bool = False,
    ) -> Recomputed:
        """Replaces rows `chosen` `[n]` (ascending) of `layers` (modified) by the model's own.

        ids `[tokens]` stand at positions 0..tokens−1. Each chosen token sees the rows before it
        that are not chosen, as they stand, and the chosen tokens up to itself. `following` `[m]`:
        ids of the next tokens, which run along and are not cached.
        """
        ...
