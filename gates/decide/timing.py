"""What a prefill, a handoff and the gate's signals take on this device, in milliseconds, at one
prompt length."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvbridge.cache.prefill import capture
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.clock import Stopwatch
from kvbridge.errors import DataError, UsageError
from kvbridge.gates.signals import DEFAULT_SIGNALS, SIGNALS, parts_of
from kvbridge.gates.signals.costs import BUDGET
from kvbridge.gates.signals.extras import Extras
from kvbridge.gates.signals.reading import Inapplicable, Reading
from kvbridge.handoff import stages
from kvbridge.handoff.bridge import Bridge
from kvbridge.handoff.cost import Speed, prefill_flops
from kvbridge.handoff.evidence import Evidence
from kvbridge.handoff.plan import RepairPlan
from kvbridge.handoff.request import Request
from kvbridge.model.model import Model


@dataclass(frozen=True)
class Timing:
    """Medians in milliseconds over `repeats` turns, and FLOPs of the same work. `signals_ms` by
    signal in their order: whoever comes first pays for a part that several share; `gate_ms` is of
    all of them in one turn, `default_ms` of those of the default set, read without the others."""

    tokens: int
    repeats: int
    threads: int
    prefill_ms: float
    first_layers_ms: float
    repair_ms: float
    handoff_ms: float
    gate_ms: float
    signals_ms: dict[str, float]
    prefill_flops: int
    handoff_parts: dict[str, int]
    gate_flops: int
    default_ms: float
    default_flops: int

    @property
    def default_share(self) -> float:
        """Signals of the default set over prefill, in measured time."""
        return self.default_ms / self.prefill_ms

    @property
    def gate_share(self) -> float:
        """Signals over prefill, in measured time."""
        return self.gate_ms / self.prefill_ms

    @property
    def gate_flops_share(self) -> float:
        """Signals over prefill, in counted FLOPs."""
        return self.gate_flops / self.prefill_flops

    @property
    def speed(self) -> Speed:
        """FLOPs per millisecond by part. What a handoff takes beyond first layers and repair is
        translation; signals of which nothing is counted go at a prefill's speed, for a speed of 0
        is none."""
        prefill = self.prefill_flops / self.prefill_ms
        translate_ms = max(
            self.handoff_ms - self.first_layers_ms - self.repair_ms, 0.01 * self.handoff_ms
        )
        return Speed(
            prefill=prefill,
            translate=self.handoff_parts["translate"] / translate_ms,
            repair=self.handoff_parts["repair"] / self.repair_ms,
            gate=self.gate_flops / self.gate_ms or prefill,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            **vars(self),
            "gate_share": self.gate_share,
            "gate_flops_share": self.gate_flops_share,
            "default_share": self.default_share,
            "budget": BUDGET,
            "flops_per_ms": self.speed.to_json(),
        }


@dataclass(frozen=True)
class _Turn:
    """Milliseconds of one turn: by piece of the handoff, and by signal."""

    pieces_ms: dict[str, float]
    signals_ms: dict[str, float]
    reading: Reading


@torch.no_grad()
def measure(
    bridge: Bridge,
    extras: Extras,
    text: str,
    *,
    plan: RepairPlan,
    signals: Sequence[str] = tuple(SIGNALS),
    tokens: int = 2048,
    repeats: int = 5,
) -> Timing:
    """Times prefill, handoff and signals in turn over the first `tokens` receiver tokens of `text`,
    after one turn that is not counted. Raises UsageError for a text or models too short for that,
    DataError where nothing is translated or a signal does not apply."""
    receiver, sender = bridge.receiver, bridge.sender
    prompt = _cut(text, receiver, sender, tokens)
    snapshot = capture(sender, prompt)
    turns = []
    for _ in range(repeats + 1):
        turns.append(_turn(bridge, extras, snapshot, prompt, plan, signals))
    counted, reading = turns[1:], turns[-1].reading
    usual = parts_of(_usual(signals))
    ids = reading.evidence.ids

    def piece(name: str) -> float:
        return statistics.median(turn.pieces_ms[name] for turn in counted)

    def signal(name: str) -> float:
        return statistics.median(turn.signals_ms[name] for turn in counted)

    return Timing(
        tokens=len(ids),
        repeats=repeats,
        threads=torch.get_num_threads(),
        prefill_ms=piece("prefill"),
        first_layers_ms=piece("first"),
        repair_ms=piece("repair"),
        handoff_ms=piece("handoff"),
        gate_ms=piece("gate"),
        signals_ms={name: signal(name) for name in signals},
        prefill_flops=prefill_flops(receiver.geometry, len(ids)),
        handoff_parts=dict(reading.evidence.parts),
        gate_flops=sum(reading.spent.values()),
        default_ms=piece("default"),
        default_flops=sum(flops for part, flops in reading.spent.items() if part in usual),
    )


def _usual(signals: Sequence[str]) -> list[str]:
    return [name for name in signals if name in DEFAULT_SIGNALS]


def _turn(
    bridge: Bridge,
    extras: Extras,
    snapshot: KVSnapshot,
    prompt: str,
    plan: RepairPlan,
    signals: Sequence[str],
) -> _Turn:
    receiver = bridge.receiver
    ids = receiver.encode(prompt).ids[None].to(receiver.device)
    prefill = partial(receiver.model, ids, use_cache=True, logits_to_keep=1)
    ms = {"prefill": _timed(receiver, prefill)}
    watch = Stopwatch(receiver.device)
    evidence = _handed(bridge, snapshot, prompt, plan)
    ms["handoff"] = watch.ms()
    if evidence.exact_layers == len(receiver.geometry.layers):
        raise DataError(
            "expected a handoff that a gate judges, found none: "
            "nothing is translated between these models"
        )
    ms["first"] = ms["repair"] = 0.0
    engine, cached_ids = bridge.pair.receiver, evidence.ids[:-1]
    if evidence.parts["prefill"]:
        ms["first"] = _timed(
            receiver, partial(engine.first_layers, cached_ids, evidence.exact_layers)
        )
    layers = [{name: t.clone() for name, t in layer.items()} for layer in evidence.translated]
    again = partial(engine.repair, cached_ids, layers, evidence.chosen, following=evidence.ids[-1:])
    ms["repair"] = _timed(receiver, again)
    reading = Reading(evidence, extras, planned=parts_of(signals))
    signals_ms = _signals(reading, signals, receiver)
    ms["gate"] = ms["default"] = sum(signals_ms.values())
    usual = _usual(signals)
    if len(usual) < len(signals):
        alone = Reading(evidence, extras, planned=parts_of(usual))
        ms["default"] = sum(_signals(alone, usual, receiver).values())
    return _Turn(ms, signals_ms, reading)


def _handed(bridge: Bridge, snapshot: KVSnapshot, prompt: str, plan: RepairPlan) -> Evidence:
    """A whole handoff as a gate watches it, up to the gate's word. Raises DataError where it is
    refused."""
    pair = bridge.pair
    asked = Request(snapshot, prompt, pair.receiver.encode(prompt), plan, observed=True)
    judged = stages.judge(pair, stages.repair(pair, bridge.prepare([asked])))
    (handoff,) = stages.assemble(pair, judged)
    if not handoff.decision.accepted:
        raise DataError(f"expected a handoff that a gate judges, found {handoff.decision}")
    return Evidence(pair, judged[0])


def _cut(text: str, receiver: Model, sender: Model, tokens: int) -> str:
    encoding = receiver.encode(text)
    if len(encoding) < tokens:
        raise UsageError(
            f"expected a text of {tokens} tokens, found {len(encoding)}; "
            "give more text or fewer --tokens"
        )
    part = text[: int(encoding.spans[tokens - 1, 1])]
    for model in (receiver, sender):
        if (count := len(model.encode(part))) > model.geometry.max_positions:
            raise UsageError(
                f"{count} tokens, {model.name} has {model.geometry.max_positions} positions; "
                "give fewer --tokens"
            )
    return part


def _signals(reading: Reading, names: Sequence[str], receiver: Model) -> dict[str, float]:
    """Milliseconds by signal, in this order."""
    times = {}
    for name in names:
        try:
            times[name] = _timed(receiver, partial(SIGNALS[name].read, reading))
        except Inapplicable as error:
            raise DataError(
                f"{name}: {error}; leave this signal out or give another repair plan"
            ) from error
    return times


def _timed(model: Model, work: Callable[[], Any]) -> float:
    """Milliseconds that `work` takes, what it queued on an accelerator included."""
    watch = Stopwatch(model.device)
    work()
    return watch.ms()
