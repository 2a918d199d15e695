"""What a prefill, a handoff and the gate's signals take on this device, in milliseconds, at one
prompt length."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvbridge.cache.features import first_layers
from kvbridge.cache.prefill import capture
from kvbridge.clock import Stopwatch
from kvbridge.engines.transformers import recompute
from kvbridge.errors import DataError, UsageError
from kvbridge.gates.calibrate.passing import Watching
from kvbridge.gates.signals import DEFAULT_SIGNALS, SIGNALS, parts_of
from kvbridge.gates.signals.costs import BUDGET
from kvbridge.gates.signals.extras import Extras
from kvbridge.gates.signals.reading import Inapplicable, Reading
from kvbridge.handoff.bridge import Bridge
from kvbridge.handoff.cost import Speed, prefill_flops
from kvbridge.handoff.evidence import Evidence
from kvbridge.handoff.plan import RepairPlan
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
    part = _cut(text, receiver, sender, tokens)
    ids, snapshot = receiver.encode(part).ids, capture(sender, part)
    translator = bridge.asset if bridge.asset is not None else bridge.translator
    took: dict[str, list[float]] = {
        "prefill": [],
        "handoff": [],
        "first": [],
        "repair": [],
        "gate": [],
        "default": [],
    }
    each: dict[str, list[float]] = {name: [] for name in signals}
    usual = [name for name in signals if name in DEFAULT_SIGNALS]
    reading: Reading | None = None
    for turn in range(repeats + 1):
        gate = Watching()
        watched = Bridge(translator, sender=sender, receiver=receiver, gate=gate)
        ms = {
            "prefill": _timed(
                receiver,
                lambda: receiver.model(
                    ids[None].to(receiver.device), use_cache=True, logits_to_keep=1
                ),
            ),
            "handoff": _timed(receiver, partial(watched.handoff, snapshot, part, repair=plan)),
        }
        if not gate.seen:
            raise DataError(
                "expected a handoff that a gate judges, found none: nothing is translated between these models"
            )
        evidence = gate.seen[0]
        ms["first"] = (
            _timed(receiver, partial(_first, evidence)) if evidence.parts["prefill"] else 0.0
        )
        layers = [{n: t.clone() for n, t in x.items()} for x in evidence.translated]
        again = partial(
            recompute,
            receiver,
            evidence.ids[:-1],
            layers,
            evidence.chosen,
            following=evidence.ids[-1:],
        )
        ms["repair"] = _timed(receiver, again)
        reading = Reading(evidence, extras, planned=parts_of(signals))
        single = _signals(reading, signals, receiver)
        ms["gate"] = ms["default"] = sum(single.values())
        if len(usual) < len(signals):
            alone = Reading(evidence, extras, planned=parts_of(usual))
            ms["default"] = sum(_signals(alone, usual, receiver).values())
        if turn:
            for name, value in ms.items():
                took[name].append(value)
            for name, value in single.items():
                each[name].append(value)
    assert reading is not None
    middle = {name: statistics.median(values) for name, values in took.items()}
    return Timing(
        len(ids),
        repeats,
        torch.get_num_threads(),
        middle["prefill"],
        middle["first"],
        middle["repair"],
        middle["handoff"],
        middle["gate"],
        {n: statistics.median(v) for n, v in each.items()},
        prefill_flops(receiver.geometry, len(ids)),
        dict(reading.evidence.parts),
        sum(reading.spent.values()),
        middle["default"],
        sum(flops for part, flops in reading.spent.items() if part in parts_of(usual)),
    )


def _cut(text: str, receiver: Model, sender: Model, tokens: int) -> str:
    encoding = receiver.encode(text)
    if len(encoding) < tokens:
        raise UsageError(
            f"expected a text of {tokens} tokens, found {len(encoding)}; give more text or fewer --tokens"
        )
    part = text[: int(encoding.spans[tokens - 1, 1])]
    for model in (receiver, sender):
        if (count := len(model.encode(part))) > model.geometry.max_positions:
            raise UsageError(
                f"{count} tokens, {model.name} has {model.geometry.max_positions} positions; give fewer --tokens"
            )
    return part


def _signals(reading: Reading, names: Sequence[str], receiver: Model) -> dict[str, float]:
    found = {}
    for name in names:
        try:
            found[name] = _timed(receiver, partial(SIGNALS[name].read, reading))
        except Inapplicable as error:
            raise DataError(
                f"{name}: {error}; leave this signal out or give another repair plan"
            ) from error
    return found


def _first(evidence: Evidence) -> Any:
    return first_layers(evidence.receiver, evidence.ids[:-1], evidence.exact_layers)


def _timed(model: Model, work: Callable[[], Any]) -> float:
    """Milliseconds that `work` takes, what it queued on an accelerator included."""
    watch = Stopwatch(model.device)
    work()
    return watch.ms()
