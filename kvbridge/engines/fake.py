"""A tiny causal attention model in plain torch behind the port: deterministic, no files, no
network.

One token a character. Its layers are those of any decoder (grouped-query attention with RoPE, then
a gated step), so that what a bridge does with it is what it does with a real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kvbridge.cache.features import FirstLayers
from kvbridge.cache.snapshot import LayerKV
from kvbridge.engines.port import Decoded, Prefilled, Recomputed
from kvbridge.errors import UsageError
from kvbridge.geometry import KVGeometry, LayerGeometry, Stream, digest_json
from kvbridge.model.chat import Chat, Messages, TemplateOptions
from kvbridge.model.rope import Rotation
from kvbridge.model.text import Encoding

HIDDEN, LAYERS, HEADS, KV_HEADS, WIDTH = 32, 3, 4, 2, 8
VOCABULARY, POSITIONS, NEW_TOKENS = 256, 4096, 64
OTHER = ord("?")
"""The token of every character beyond the vocabulary."""


class Phases(nn.Module):
    """cos and sin `[1, tokens, WIDTH]` of positions `[1, tokens]`, half-split."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        steps = torch.arange(WIDTH // 2) / (WIDTH // 2)
        self.register_buffer("frequencies", 1000.0**-steps)

    def forward(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """In the dtype of `like`."""
        angles = positions[..., None].to(like.dtype) * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


@dataclass(frozen=True, eq=False)
class FakeQueries:
    """Queries of one forward by layer, `[tokens, HEADS, WIDTH]`, already rotated and scaled."""

    by_layer: dict[int, Tensor] = field(default_factory=dict)

    def at(self, layer: int, rows: Tensor, positions: Tensor) -> Tensor | None:
        """Of the forward's tokens `rows` `[n]`; `positions` are those they ran at."""
        queries = self.by_layer.get(layer)
        return None if queries is None else queries[rows]


@dataclass(frozen=True, eq=False)
class Forward:
    """What a forward leaves: the residual stream `[n, HIDDEN]`, what entered each layer that ran,
    each layer's new rows `[n, KV_HEADS, WIDTH]`, and the queries."""

    states: Tensor
    entered: list[Tensor]
    rows: list[LayerKV]
    queries: FakeQueries


@dataclass(frozen=True, eq=False)
class FakeEngine:
    """Weights follow from `seed` alone: two engines of one seed are the same model."""

    seed: int = 0

    @property
    def name(self) -> str:
        """By its seed."""
        return f"fake-{self.seed}"

    @property
    def model(self) -> FakeEngine:
        """There is no other."""
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Single precision."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Every matrix, by name: `embedding`, `head`, and per layer `{layer}.{q|k|v|o|gate}`."""
        shapes = {"embedding": (VOCABULARY, HIDDEN), "head": (HIDDEN, VOCABULARY)}
        queries, keys = HEADS * WIDTH, KV_HEADS * WIDTH
        for layer in range(LAYERS):
            shapes |= {f"{layer}.{name}": (HIDDEN, keys) for name in ("k", "v")}
            shapes |= {f"{layer}.q": (HIDDEN, queries), f"{layer}.o": (queries, HIDDEN)}
            shapes[f"{layer}.gate"] = (HIDDEN, HIDDEN)
        draw = torch.Generator().manual_seed(self.seed)
        return {
            name: 2 * torch.randn(shape, generator=draw) / HIDDEN**0.5
            for name, shape in shapes.items()
        }

    @cached_property
    def geometry(self) -> KVGeometry:
        """Of weights that the seed names."""
        parameters = {name: tensor.numel() for name, tensor in self.weights.items()}
        streams = (Stream("k", KV_HEADS, WIDTH, True), Stream("v", KV_HEADS, WIDTH, False))
        return KVGeometry(
            model_id=self.name,
            commit="",
            architecture="FakeEngine",
            dtype="float32",
            hidden_size=HIDDEN,
            attention_heads=HEADS,
            max_positions=POSITIONS,
            vocabulary=VOCABULARY,
            parameters=sum(parameters.values()),
            layer_parameters=sum(n for name, n in parameters.items() if "." in name),
            layers=tuple(
                LayerGeometry("full", streams, None, digest_json([self.seed, layer]))
                for layer in range(LAYERS)
            ),
            tokenizer_digest=digest_json("one token a character"),
            rope_digest=self.rotation.digest(),
            config_digest=digest_json([HIDDEN, LAYERS, HEADS, KV_HEADS, WIDTH]),
            embedding_digest=digest_json([self.seed, "embedding"]),
            weights_digest=digest_json(self.seed),
        )

    @cached_property
    def rotation(self) -> Rotation:
        """Half-split in every layer."""
        return Rotation(Phases(), (None,) * LAYERS, ("half_split",) * LAYERS)

    def changed(self) -> str | None:
        """Never."""
        return None

    def encode(self, text: str) -> Encoding:
        """One token a character."""
        ids = [ord(c) if ord(c) < VOCABULARY else OTHER for c in text]
        starts = torch.arange(len(ids))
        spans = torch.stack((starts, starts + 1), dim=1)
        return Encoding(torch.tensor(ids, dtype=torch.int64), spans)

    def encode_ids(self, token_ids: Tensor) -> tuple[str, Encoding]:
        """The inverse, as far as the vocabulary goes."""
        text = self.spell(token_ids)
        return text, self.encode(text)

    def spell(self, token_ids: Tensor) -> str:
        """One character a token."""
        return "".join(chr(i) for i in token_ids.tolist())

    def chat(self, messages: Messages, template: TemplateOptions | None = None) -> Chat:
        """Raises UsageError."""
        raise UsageError(f"{self.name} has no chat template; pass text= instead of messages=")

    def render(self, messages: Messages) -> str:
        """The text of `chat`."""
        return self.chat(messages).text

    def prefill(self, ids: Tensor) -> list[LayerKV]:
        """One forward."""
        return self._forward(ids, torch.arange(len(ids))).rows

    def decode(self, ids: Tensor, layers: list[LayerKV]) -> Decoded:
        """One forward over `layers`."""
        start = len(layers[0]["k"])
        forward = self._forward(ids, torch.arange(start, start + len(ids)), layers)
        grown = [
            {name: torch.cat((tensor, new[name])) for name, tensor in layer.items()}
            for layer, new in zip(layers, forward.rows, strict=True)
        ]
        return Decoded(_normed(forward.states) @ self.weights["head"], grown)

    def generate(
        self, prompt: Prefilled, max_new_tokens: int | None = None, **options: Any
    ) -> Tensor:
        """Greedily; `do_sample=False` is the one option there is."""
        if set(options) - {"do_sample"} or options.get("do_sample"):
            raise UsageError(f"{self.name} decodes greedily, found {', '.join(options)}")
        if len(prompt.ids) == 0:
            raise UsageError("the prompt is empty: there is no token to go on from")
        ids = prompt.ids
        layers = prompt.layers or self.prefill(ids[:-1])
        for _ in range(NEW_TOKENS if max_new_tokens is None else max_new_tokens):
            decoded = self.decode(ids[len(layers[0]["k"]) :], layers)
            layers = decoded.layers
            ids = torch.cat((ids, decoded.logits[-1].argmax()[None]))
        return ids[None]

    def generate_many(
        self, prompts: Sequence[Prefilled], max_new_tokens: int | None = None, **options: Any
    ) -> list[Tensor]:
        """One after the other."""
        return [self.generate(prompt, max_new_tokens, **options)[0] for prompt in prompts]

    def first_layers(
        self,
        ids: Tensor,
        count: int,
        *,
        entering: int | None = None,
        past: Sequence[LayerKV] = (),
    ) -> FirstLayers:
        """One forward of `count` layers."""
        wanted = count if entering is None else entering
        if not 0 <= wanted <= count < LAYERS:
            raise UsageError(
                f"expected 0 to {LAYERS - 1} first layers of {self.name} and features up to them, "
                f"found {count} and {wanted}"
            )
        start = len(past[0]["k"]) if past else 0
        places = torch.arange(start, start + len(ids))
        forward = self._forward(ids, places, past, count=count)
        return FirstLayers([*forward.entered, forward.states][wanted], forward.rows)

    def repair(
        self,
        ids: Tensor,
        layers: list[LayerKV],
        chosen: Tensor,
        *,
        following: Tensor | None = None,
        record_queries: bool = False,
    ) -> Recomputed:
        """One forward of the chosen and the following tokens over the other rows; `layers` is
        modified."""
        count = len(ids)
        more = torch.zeros(0, dtype=torch.int64) if following is None else following
        if len(chosen) + len(more) == 0:
            return Recomputed(None, None)
        kept = torch.ones(count, dtype=torch.bool)
        kept[chosen] = False
        kept_at = kept.nonzero()[:, 0]
        past = [{name: t[kept_at] for name, t in layer.items()} for layer in layers]
        places = torch.cat((chosen, torch.arange(count, count + len(more))))
        forward = self._forward(torch.cat((ids[chosen], more)), places, past, past_at=kept_at)
        for layer, new in zip(layers, forward.rows, strict=True):
            for name, tensor in layer.items():
                tensor[chosen] = new[name][: len(chosen)]
        return Recomputed(_normed(forward.states), forward.queries if record_queries else None)

    @torch.no_grad()
    def _forward(
        self,
        ids: Tensor,
        places: Tensor,
        past: Sequence[LayerKV] = (),
        *,
        past_at: Tensor | None = None,
        count: int = LAYERS,
    ) -> Forward:
        """Layers 0..count−1 over ids `[n]` at positions `places` `[n]`, after rows `past` of each
        layer at positions `past_at` (None: from 0 on). Every token sees rows at its own position
        and before."""
        weights, states = self.weights, self.weights["embedding"][ids]
        before = torch.arange(len(past[0]["k"]) if past else 0) if past_at is None else past_at
        hidden_from = torch.cat((before, places))[None] > places[:, None]
        entered, rows, queries = [], [], FakeQueries()
        for layer in range(count):
            entered.append(states)
            normed = _normed(states)
            heads = (normed @ weights[f"{layer}.q"]).unflatten(-1, (HEADS, WIDTH))
            queries.by_layer[layer] = self.rotation.rotate(heads, places, layer) / WIDTH**0.5
            keys = (normed @ weights[f"{layer}.k"]).unflatten(-1, (KV_HEADS, WIDTH))
            values = (normed @ weights[f"{layer}.v"]).unflatten(-1, (KV_HEADS, WIDTH))
            new = {"k": self.rotation.rotate(keys, places, layer), "v": values}
            rows.append(new)
            seen = new
            if past:
                seen = {name: torch.cat((past[layer][name], t)) for name, t in new.items()}
            mixed = _attention(queries.by_layer[layer], seen, hidden_from)
            states = states + mixed @ weights[f"{layer}.o"]
            states = states + torch.tanh(_normed(states) @ weights[f"{layer}.gate"])
        return Forward(states, entered, rows, queries)


def _attention(queries: Tensor, seen: LayerKV, hidden_from: Tensor) -> Tensor:
    """Mixed values `[n, HEADS · WIDTH]` of queries `[n, HEADS, WIDTH]` over `seen` rows
    `[tokens, KV_HEADS, WIDTH]`; `hidden_from` `[n, tokens]`: rows that a query does not see."""
    # Neighbouring query heads share a head of keys and values.
    keys, values = (seen[name].repeat_interleave(HEADS // KV_HEADS, dim=1) for name in ("k", "v"))
    logits = torch.einsum("nhw,thw->nht", queries, keys)
    weights = logits.masked_fill(hidden_from[:, None], -torch.inf).softmax(-1)
    return torch.einsum("nht,thw->nhw", weights, values).flatten(1)


def _normed(states: Tensor) -> Tensor:
    """Rows of length √HIDDEN."""
    return states / states.square().mean(-1, keepdim=True).add(1e-6).sqrt()
