"""When a handoff is faster than a prefill: both timed in turn at several prompt lengths, compared
as ratios of one run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbridge.cache.prefill import capture
from kvbridge.clock import Stopwatch
from kvbridge.eval.tasks.start import forward
from kvbridge.handoff.bridge import Bridge
from kvbridge.handoff.cost import prefill_flops
from kvbridge.handoff.plan import RepairPlan
from kvbridge.model.model import Model

LENGTHS = (64, 128, 256, 512, 1024, 2000)
REPEATS = 7


@dataclass(frozen=True)
class Latency:
    """Medians in milliseconds to the first token's logits at one prompt length, and the handoff's
    share of FLOPs."""

    tokens: int
    handoff_ms: float
    prefill_ms: float
    flops_share: float

    @property
    def ratio(self) -> float:
        """Prefill over handoff: above 1 the handoff is faster."""
        return self.prefill_ms / self.handoff_ms

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "tokens": self.tokens,
            "handoff_ms": self.handoff_ms,
            "prefill_ms": self.prefill_ms,
            "ratio": self.ratio,
            "flops_share": self.flops_share,
        }


@torch.no_grad()
def measure_latency(
    bridge: Bridge,
    text: str,
    *,
    lengths: Sequence[int] = LENGTHS,
    repeats: int = REPEATS,
    plan: RepairPlan | None = None,
) -> list[Latency]:
    """Times handoff (translate, repair, last token) and prefill alternately over prefixes of
    `text`; lengths that the text or either model's positions do not reach are left out."""
    receiver, sender = bridge.receiver, bridge.sender
    whole = receiver.encode(text)
    measured = []
    for length in lengths:
        if length > len(whole) or length > min(
            receiver.geometry.max_positions, sender.geometry.max_positions
        ):
            continue
        part = text[: int(whole.spans[length - 1, 1])]
        ids = receiver.encode(part).ids
        snapshot = capture(sender, part)
        handed, dense, flops = [], [], 0
        for turn in range(repeats + 1):
            watch = Stopwatch(receiver.device)
            handoff = bridge.handoff(snapshot, part, repair=plan)
            forward(receiver, handoff.remaining_ids, handoff.cache, handoff.cached, keep=1)
            first = watch.ms()
            watch = Stopwatch(receiver.device)
            receiver.model(ids[None].to(receiver.device), use_cache=True, logits_to_keep=1)
            second = watch.ms()
            flops = handoff.decision.predicted_flops or 0
            if turn:
                handed.append(first)
                dense.append(second)
        share = flops / prefill_flops(receiver.geometry, len(ids))
        measured.append(
            Latency(len(ids), statistics.median(handed), statistics.median(dense), share)
        )
    return measured


def break_even(rows: Sequence[Latency]) -> int | None:
    """Prompt length from which a handoff is faster at every longer length measured, by linear
    interpolation of the ratio between the two lengths around it; None where it never is."""
    if not rows or rows[-1].ratio <= 1:
        return None
    last_slower = max((i for i, row in enumerate(rows) if row.ratio <= 1), default=-1)
    if last_slower < 0:
        return rows[0].tokens
    slow, fast = rows[last_slower], rows[last_slower + 1]
    share = (1 - slow.ratio) / (fast.ratio - slow.ratio)
    return round(slow.tokens + share * (fast.tokens - slow.tokens))


def longest_text(model: Model, texts: Sequence[str], tokens: int) -> str:
    """Texts joined until they reach `tokens` of the model's tokens."""
    joined = ""
    for text in texts:
        joined += text + "\n"
        if len(model.encode(joined)) >= tokens:
            break
    return joined
