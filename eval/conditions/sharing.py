"""One translation for conditions that differ only in how much of it is recomputed afterwards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from kvbridge.asset.maps.translator import Translator
from kvbridge.cache.snapshot import LayerKV


@dataclass(eq=False)
class Memory:
    """The last translation: what went in, what came out, its milliseconds. `reused_ms`: milliseconds of work that later
    calls were spared and that their condition would have needed alone."""

    content: dict[int, LayerKV] = field(default_factory=dict)
    features: Tensor | None = None
    skip_layers: int = 0
    out: dict[int, LayerKV] | None = None
    ms: float = 0.0
    reused_ms: float = 0.0

    def taken(self) -> float:
        """Milliseconds spared since the last call of this."""
        spared, self.reused_ms = self.reused_ms, 0.0
        return spared


@dataclass(frozen=True, eq=False)
class SharedTranslator(Translator):
    """A translator that recognises rows it has just translated: a longer recomputed tail asks for the same rows but the
    last ones. Inputs are compared by value; each row is translated by itself, so the rows that are left are the same.
    """

    memory: Memory = field(default_factory=Memory)

    @classmethod
    def of(cls, translator: Translator) -> SharedTranslator:
        """The same maps with a memory of their own."""
        return cls(**{f.name: getattr(translator, f.name) for f in fields(Translator)})

    @torch.no_grad()
    def __call__(
        self, content: Mapping[int, LayerKV], features: Tensor | None, *, skip_layers: int = 0
    ) -> dict[int, LayerKV]:
        """As of Translator."""
        memory, rows = self.memory, _rows(content, features)
        count = len(rows[0]) if rows else 0
        known = _rows(memory.content, memory.features) if memory.out is not None else []
        if (
            memory.out is not None
            and skip_layers == memory.skip_layers
            and content.keys() == memory.content.keys()
            and len(rows) == len(known)
            and all(
                len(a) <= len(b) and torch.equal(a, b[: len(a)])
                for a, b in zip(rows, known, strict=True)
            )
        ):
            memory.reused_ms += memory.ms
            return {
                layer: {name: t[:count] for name, t in streams.items()}
                for layer, streams in memory.out.items()
            }
        start = _now_ms(rows)
        out = super().__call__(content, features, skip_layers=skip_layers)
        memory.ms = _now_ms(rows) - start
        memory.content, memory.features, memory.skip_layers, memory.out = (
            dict(content),
            features,
            skip_layers,
            out,
        )
        return out


def _rows(content: Mapping[int, LayerKV], features: Tensor | None) -> list[Tensor]:
    """Everything that a translation reads, in a fixed order, `[tokens, …]` each."""
    streams = [content[layer][name] for layer in sorted(content) for name in sorted(content[layer])]
    return streams if features is None else [features, *streams]


def _now_ms(tensors: list[Tensor]) -> float:
    """Milliseconds on a clock, the device of `tensors` waited for."""
    if tensors and tensors[0].is_cuda:
        torch.cuda.synchronize(tensors[0].device)
    return 1000 * time.perf_counter()
