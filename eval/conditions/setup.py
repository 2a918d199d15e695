"""The models, maps and repair of one evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch

from kvbridge.asset.folder import Asset
from kvbridge.asset.maps.dense import DenseMaps
from kvbridge.asset.maps.translator import Translator
from kvbridge.errors import EvalError
from kvbridge.fitting.families.full_head import full_head
from kvbridge.gates.decide import CalibratedGate, Ladder
from kvbridge.geometry import KVGeometry
from kvbridge.handoff.bridge import Bridge
from kvbridge.handoff.plan import RepairPlan
from kvbridge.handoff.ports import Gate
from kvbridge.model.model import Model


@dataclass(frozen=True, eq=False)
class Setup:
    """Models, translator and control of one pair, shared by all items. `plan` is the repair of
    every condition, with its `tail` set to what the condition's name says; `gated` takes it whole.
    Where the gate was calibrated for several plans, `ladder` tries them as its thresholds expect,
    and `plan` is the first."""

    sender: Model
    receiver: Model
    bridge: Bridge
    control: Bridge
    gated: Bridge | None = None
    plan: RepairPlan = field(default_factory=RepairPlan)
    ladder: Ladder | None = None

    @classmethod
    def of(
        cls,
        asset: Asset | Translator,
        controls: Translator,
        sender: Model,
        receiver: Model,
        *,
        gate: Gate | None = None,
        plan: RepairPlan | None = None,
    ) -> Setup:
        """From an asset (or translator) and its control map. Raises EvalError for a gate whose
        plans differ in more than their tail, or are not those of `plan`."""
        plans = plans_of(gate, plan)
        return cls(
            sender,
            receiver,
            Bridge(asset, sender=sender, receiver=receiver),
            Bridge(controls, sender=sender, receiver=receiver),
            None if gate is None else Bridge(asset, sender=sender, receiver=receiver, gate=gate),
            plans[0],
            _ladder(asset, sender, receiver, gate) if len(plans) > 1 else None,
        )

    @cached_property
    def raw_bridge(self) -> Bridge | None:
        """The sender's cache taken as it is (content space, so positions stay right), where shapes
        and tokens agree."""
        return raw_bridge(self.sender, self.receiver)

    @property
    def plans(self) -> tuple[RepairPlan, ...]:
        """The repair plans that `gated` may try, cheapest first."""
        if self.ladder is None:
            return (self.plan,)
        return tuple(rung.plan for rung in self.ladder.calibration.rungs)

    @property
    def tails(self) -> tuple[int, ...]:
        """The tails that a request may end on behind the gate."""
        return tuple(plan.tail for plan in self.plans)

    @cached_property
    def controls_digest(self) -> str:
        """Digest of every number of the control map."""
        controls = self.control.translator
        return "" if controls is None else controls.digest


def plans_of(gate: Gate | None, plan: RepairPlan | None) -> tuple[RepairPlan, ...]:
    """The repair plans that `gated` tries, cheapest first: those the gate was calibrated for where
    they are several, else `plan`. Raises EvalError where they (and `plan`) differ in more than
    their tail."""
    calibration = gate.calibration if isinstance(gate, CalibratedGate) else None
    rungs = () if calibration is None else tuple(rung.plan for rung in calibration.rungs)
    if len(rungs) < 2:
        return (plan or RepairPlan(),)
    check_alike(rungs if plan is None else (plan, *rungs))
    return rungs


def check_alike(plans: Sequence[RepairPlan]) -> None:
    """Raises EvalError unless `plans` differ in their tail alone: a condition's name says a route
    and a tail, so another difference has no ungated translation to compare with."""
    if len({(plan.sinks, plan.layers, plan.tokens) for plan in plans}) > 1:
        given = "; ".join(
            f"sinks {p.sinks}, tail {p.tail}, layers {p.layers}, tokens {list(p.tokens)}"
            for p in plans
        )
        raise EvalError(
            f"expected repair plans that differ in their tail alone, found {given}: an evaluation "
            "has no ungated translation to compare these with; calibrate on plans that do "
            "(kvbridge gate calibrate --tails)"
        )


def _ladder(asset: Asset | Translator, sender: Model, receiver: Model, gate: Gate | None) -> Ladder:
    """The ladder around a calibrated gate, with everything the gate was given."""
    assert isinstance(gate, CalibratedGate)
    assert gate.calibration is not None
    if not isinstance(asset, Asset):
        raise EvalError(
            "a calibration is bound to an asset's digest: give an asset of kvbridge.load_asset"
        )
    own = {f.name: getattr(gate, f.name) for f in fields(gate) if f.name != "tenant"}
    return Ladder(asset, sender=sender, receiver=receiver, **own)


def raw_bridge(sender: Model, receiver: Model) -> Bridge | None:
    """A bridge whose maps change nothing; None where shapes or tokenizers differ."""
    giving, taking = sender.geometry, receiver.geometry
    same_tokens = giving.tokenizer_digest == taking.tokenizer_digest
    if not same_tokens or _shapes(giving) != _shapes(taking):
        return None
    groups = {}
    for index, layer in enumerate(taking.layers):
        for stream in layer.streams:
            groups[index, stream.name] = full_head(giving, taking, index, stream.name, (index,))
    maps = DenseMaps(giving, taking, False, groups)
    tensors = {
        name: torch.eye(shape[0]) if len(shape) == 2 else torch.zeros(shape)
        for name, shape in maps.shapes.items()
    }
    translator = Translator("identity", "none", maps, tensors)
    return Bridge(translator, sender=sender, receiver=receiver)


def _shapes(geometry: KVGeometry) -> list[list[tuple[int, int]]]:
    """Heads and width of every layer's streams."""
    return [[(s.heads, s.width) for s in layer.streams] for layer in geometry.layers]
