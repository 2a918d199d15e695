"""What the receiver recomputes on top of a translated cache, and what may be called exact then."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbridge.cache.provenance import FIDELITIES
from kvbridge.codec import check_fields
from kvbridge.errors import UsageError

APPROXIMATE, REPAIRED, EXACT = (FIDELITIES.index(f) for f in ("approximate", "repaired", "exact"))


@dataclass(frozen=True)
class RepairPlan:
    """What the receiver recomputes: the first `sinks` tokens, the last `tail` (the very last one
    stays uncached and opens generation, so tail ≥ 1), the first `layers` layers over all tokens,
    and chosen `tokens` by position.
    """

    sinks: int = 4
    tail: int = 1
    layers: int = 1
    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.sinks < 0 or self.tail < 1 or self.layers < 0 or any(t < 0 for t in self.tokens):
            raise UsageError(
                f"expected sinks ≥ 0, tail ≥ 1, layers ≥ 0 and tokens ≥ 0, found {self}"
            )

    def chosen(self, cached: int, extra: Tensor | None = None) -> Tensor:
        """Positions `[n]` (int64, ascending) recomputed among the `cached` tokens; `extra`
        `[cached]` adds to them."""
        marks = torch.zeros(cached, dtype=torch.bool) if extra is None else extra.clone()
        marks[: self.sinks] = True
        marks[max(0, cached - self.tail + 1) :] = True
        marks[[t for t in self.tokens if t < cached]] = True
        return marks.nonzero()[:, 0]

    def check(self, layers: int) -> None:
        """Raises UsageError where a receiver of `layers` layers would have none left to
        translate."""
        if self.layers >= layers:
            raise UsageError(
                f"repairing {self.layers} of {layers} layers is a prefill; choose fewer"
            )


def fidelity_map(layers: int, cached: int, exact_layers: int, chosen: Tensor) -> list[list[int]]:
    """Indices into FIDELITIES `[layers][cached]` after a repair.

    Exact: the first `exact_layers` layers; chosen tokens that form an unbroken prefix (sinks); and
    chosen tokens in layer `exact_layers` itself, whose KV depends on exact layers only. Other
    chosen tokens are repaired. What the receiver had before counts as chosen.
    """
    if exact_layers >= layers or len(chosen) == cached:
        return [[EXACT] * cached for _ in range(layers)]
    picked = set(chosen.tolist())
    prefix = next((t for t in range(cached) if t not in picked), cached)
    rows = []
    for layer in range(layers):
        if layer < exact_layers:
            rows.append([EXACT] * cached)
            continue
        own = EXACT if layer == exact_layers else REPAIRED
        rows.append(
            [EXACT if t < prefix else own if t in picked else APPROXIMATE for t in range(cached)]
        )
    return rows
