"""One request as signals see it: evidence, what was fitted for the gate, and shared work done once
and counted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kvbridge.asset.leverage import Factor
from kvbridge.asset.maps.translator import Translator
from kvbridge.cache.features import early_kv, noted
from kvbridge.cache.prefill import run_decoder
from kvbridge.cache.snapshot import LayerKV, build_cache
from kvbridge.gates.signals.costs import (
    KNOWN,
    NEXT_TOKEN_RUN,
    RECEIVER_HEAD,
    SAMPLED,
    SENDER_EARLY_RUN,
    SENDER_FIRST_RUN,
    SENDER_ROWS,
    SENDER_TAIL_RUN,
    GatePart,
    Shape,
    early_layers,
)
from kvbridge.gates.signals.extras import Extras
from kvbridge.handoff.evidence import Evidence
from kvbridge.model.model import Model


class Inapplicable(Exception):
    """A signal that cannot be read from this request; the gate refuses, naming why."""


@dataclass(frozen=True)
class Tail:
    """The sender's last tokens run again over its own cache: log probabilities `[n, vocabulary]`
    after each of them, their rows, and K/V as the second run gives them."""

    logs: Tensor
    rows: Tensor
    layers: list[LayerKV]


@dataclass(eq=False)
class Reading:
    """`spent`: FLOPs of what was computed so far, by name of the part; `planned`: names of parts
    that are going to be read, so that two of them can share one pass over large weights. Nothing in
    `evidence` is modified."""

    evidence: Evidence
    extras: Extras
    spent: dict[str, int] = field(default_factory=dict)
    planned: Collection[str] = ()
    _made: dict[str, Tensor] = field(default_factory=dict)
    _content: dict[tuple[int, tuple[int, ...]], LayerKV] = field(default_factory=dict)

    def spend(self, part: GatePart) -> None:
        """Counts one part, once, whichever signal needs it first."""
        if part.name not in self.spent:
            self.spent[part.name] = part.flops(self.shape)

    @cached_property
    def shape(self) -> Shape:
        """What the costs of this request depend on."""
        e = self.evidence
        return Shape(
            e.sender.geometry,
            e.receiver.geometry,
            len(e.ids),
            factor_numbers(self.factors),
            self.extras.halves_parameters,
            self.translator.only(range(e.exact_layers)).flops(),
            len(e.snapshot),
        )

    @property
    def translator(self) -> Translator:
        """The translator whose output is judged."""
        if self.evidence.asset is None:
            raise Inapplicable("the translator is no asset")
        return self.evidence.asset.translator

    @property
    def factors(self) -> Mapping[str, Factor]:
        """By stream, what is usual among the rows that the translator was fitted on; nothing where
        it is no asset."""
        return {} if self.evidence.asset is None else self.evidence.asset.factors

    def sampled(self, count: int = SAMPLED) -> Tensor:
        """Up to `count` covered receiver tokens after the sinks, evenly spaced, `[n]`."""
        rows = self.evidence.alignment.covered.nonzero()[:, 0]
        rows = rows[rows >= self.evidence.plan.sinks]
        if len(rows) == 0:
            raise Inapplicable("no translated token after the sinks")
        at = torch.linspace(0, len(rows) - 1, min(count, len(rows))).round().long()
        return rows[at]

    def content(self, rows: Tensor, layer: int) -> LayerKV:
        """The sender's rows read by receiver tokens `rows` `[n]`, RoPE removed, `[n, heads, width]`
        fp32. Kept, for signals share their samples: not to be modified."""
        e, key = self.evidence, (layer, tuple(rows.tolist()))
        if key not in self._content:
            read = e.alignment.index[rows]
            self._content[key] = e.snapshot.content(e.sender.rotation, read, layer)
        return self._content[key]

    @cached_property
    def tail(self) -> Tensor:
        """Known tokens that the receiver recomputed, `[n]`: chosen rows after the sinks, as far as
        the plan's tail goes."""
        if len(self._recomputed) == 0:
            raise Inapplicable("no known token was recomputed: the plan's tail is too short")
        return self._recomputed

    @cached_property
    def _recomputed(self) -> Tensor:
        e = self.evidence
        cached = len(e.ids) - 1
        first = max(e.plan.sinks, cached - e.plan.tail + 1)
        rows = e.chosen[e.chosen >= first]
        return rows[e.alignment.covered[rows]]

    @cached_property
    def receiver_tail_logs(self) -> tuple[Tensor, Tensor]:
        """Log probabilities `[n, vocabulary]` after each of the last known tokens, and the ids that
        followed `[n]`."""
        self.spend(RECEIVER_HEAD)
        rows = self.tail[-KNOWN:]
        return self._logs(RECEIVER_HEAD), self.evidence.ids[rows + 1]

    @cached_property
    def next_logs(self) -> Tensor:
        """Log probabilities `[vocabulary]` of the token after the prompt, under the repaired
        cache."""
        self.spend(NEXT_TOKEN_RUN)
        return self._logs(NEXT_TOKEN_RUN)[0]

    def _logs(self, part: GatePart) -> Tensor:
        """Log probabilities `[n, vocabulary]` that `part` asks for; what is planned besides goes
        through the head with it, because reading the head's weights costs more time than
        multiplying a few rows by them."""
        if part.name not in self._made:
            e = self.evidence
            places = {
                RECEIVER_HEAD.name: torch.searchsorted(e.chosen, self._recomputed[-KNOWN:]),
                NEXT_TOKEN_RUN.name: torch.tensor([len(e.chosen)]),
            }
            names = [part.name]
            for name, rows in places.items():
                if name in self.planned and name not in (part.name, *self._made) and len(rows):
                    names.append(name)
            together = torch.cat([places[name] for name in names])
            logs = head(e.receiver, e.states[together.to(e.states.device)])
            pieces = logs.split([len(places[name]) for name in names])
            self._made |= dict(zip(names, pieces, strict=True))
        return self._made[part.name]

    @cached_property
    def _sender_last(self) -> Tensor:
        """The sender's last KNOWN + 1 rows, all but the first at most, `[n]`."""
        snapshot, count = self.evidence.snapshot, len(self.evidence.snapshot)
        if int(snapshot.positions[-1]) != count - 1:
            raise Inapplicable("the snapshot has holes")
        new = min(KNOWN + 1, count - 1)
        if new < 2:
            raise Inapplicable(f"the snapshot has {count} tokens")
        return torch.arange(count - new, count)

    def _before(self, rows: Tensor, layers: int) -> list[LayerKV]:
        """The snapshot's own rows before `rows`, of the first `layers` layers; views."""
        return [
            {name: t[: int(rows[0])] for name, t in x.items()}
            for x in self.evidence.snapshot.layers[:layers]
        ]

    @cached_property
    def sender_tail(self) -> Tail:
        """The sender's last KNOWN + 1 tokens run again over the snapshot's own rows before them."""
        sender, ids = self.evidence.sender, self.evidence.snapshot.token_ids
        rows = self._sender_last
        self.spend(SENDER_TAIL_RUN)
        cache = build_cache(sender, self._before(rows, len(sender.layers)))
        with noted(cache) as again:
            output = run_decoder(
                sender,
                ids[rows][None],
                cache=cache,
                position_ids=rows[None],
                attention_mask=torch.ones((1, len(ids)), dtype=torch.int64),
            )
        return Tail(head(sender, output.last_hidden_state[0]), rows, again)

    @cached_property
    def sender_early(self) -> tuple[Tensor, list[LayerKV]]:
        """The sender's last KNOWN + 1 rows `[n]` and their K/V in its first layers, run again over
        the snapshot's own rows of those layers."""
        sender, ids = self.evidence.sender, self.evidence.snapshot.token_ids
        rows = self._sender_last
        self.spend(SENDER_EARLY_RUN)
        before = self._before(rows, early_layers(sender.geometry))
        return rows, early_kv(sender, ids[rows], rows, before)

    @cached_property
    def sender_first(self) -> tuple[Tensor, LayerKV]:
        """Sampled sender rows `[n]` and their first layer's K/V, which depend on each token and its
        position alone."""
        e = self.evidence
        self.spend(SENDER_FIRST_RUN)
        count = len(e.snapshot)
        rows = torch.linspace(0, count - 1, min(SENDER_ROWS, count)).round().long()
        return rows, early_kv(e.sender, e.snapshot.token_ids[rows], e.snapshot.positions[rows])[0]


def head(model: Model, states: Tensor) -> Tensor:
    """Log probabilities `[n, vocabulary]` fp32 of states `[n, hidden]` that left the decoder."""
    config = model.model.config.get_text_config(decoder=True)
    logits = model.model.get_output_embeddings()(states).float()
    # What a model's own forward does after its head: Cohere multiplies, Granite divides, Gemma
    # caps.
    factor = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    logits = logits * factor / divisor
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits.log_softmax(-1)


def factor_numbers(factors: Mapping[str, Factor]) -> int:
    """Multiply-adds of one row's projections onto all factors."""
    return sum(factor.directions.numel() for factor in factors.values())
