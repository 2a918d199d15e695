"""The repair ladder around a gate: cheap repair plans first, dearer ones where the score asks for
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kvbridge.asset.folder import Asset
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.engines.port import Engine
from kvbridge.gates.decide.gate import CalibratedGate
from kvbridge.gates.decide.policy import Policy
from kvbridge.gates.decide.sealed import Calibration, Rung
from kvbridge.handoff import stages
from kvbridge.handoff.bridge import Bridge
from kvbridge.handoff.cost import prefill_flops, request_parts
from kvbridge.handoff.decision import Decision
from kvbridge.handoff.plan import RepairPlan
from kvbridge.handoff.ports import Ledger
from kvbridge.handoff.request import Request, after
from kvbridge.handoff.result import Handoff
from kvbridge.model.model import Model


class Ladder:
    """Tries repair plans, cheapest first, up to where a prefill takes fewer FLOPs, and ends on the
    first whose score is at most `calibration.stop`, accepted there or not: the rule that its
    thresholds were calibrated under, whatever the device and the policy.

    A request is translated once; every rung repairs and judges that translation. Where the ladder
    ends counts each rung as if it were tried alone, as the calibration did; what a decision
    predicts counts work that rungs share once.

    `policies`: by tenant; another tenant gets `policy`. Everything else goes to CalibratedGate.
    """

    def __init__(
        self,
        asset: Asset,
        *,
        sender: Model | Engine,
        receiver: Model | Engine,
        calibration: Calibration,
        policy: Policy | None = None,
        policies: Mapping[str, Policy] | None = None,
        ledger: Ledger | None = None,
        **gate: Any,
    ) -> None:
        self.calibration = calibration
        self._bridge = Bridge(asset, sender=sender, receiver=receiver, ledger=ledger)
        self._policy, self._policies, self._options = policy or Policy(), policies or {}, gate
        self._gates: dict[str, CalibratedGate] = {}

    def handoff(self, snapshot: KVSnapshot, text: str, *, tenant: str = "") -> Handoff:
        """The handoff of the rung that the request ends on, else the last refusal; its decision
        counts FLOPs and milliseconds of all attempts."""
        return self.climb(snapshot, text, tenant=tenant)[0]

    def climb(self, snapshot: KVSnapshot, text: str, *, tenant: str = "") -> tuple[Handoff, Rung]:
        """The same, with the rung that the request ended on."""
        request, rung = self.judged(snapshot, text, tenant=tenant)
        return stages.assemble(self._bridge.pair, [request])[0], rung

    def judged(self, snapshot: KVSnapshot, text: str, *, tenant: str = "") -> tuple[Request, Rung]:
        """The judged request of the rung that it ends on, and that rung."""
        receiver, rungs = self._bridge.pair.receiver, self.calibration.rungs
        encoding = receiver.encode(text)
        dense = prefill_flops(receiver.geometry, len(encoding))
        gate = self._gate(tenant)
        request = Request(snapshot, text, encoding, rungs[0].plan, observed=True)
        alone, last, ended = 0, 0, rungs[0]
        flops, ms = 0, 0.0
        for number, rung in enumerate(rungs):
            if number > 0 and alone + last >= dense:
                break
            before, ended = request, rung
            request = self._attempt(request, rung.plan, gate)
            decision = after("judge", request.decision)
            last = decision.predicted_flops or 0
            alone += last
            if decision.predicted_flops is not None:  # None: refused before anything was counted
                shared = self._shared(before, request)
                flops += last - sum(shared.values())
                if gate.speed is not None and decision.predicted_ms is not None:
                    ms += decision.predicted_ms - gate.speed.ms(shared)
            if not self._climbs(decision):
                break
        decision = after("judge", request.decision)
        total = replace(decision, predicted_flops=flops or None, predicted_ms=ms or None)
        return replace(request, decision=total), ended

    def _gate(self, tenant: str) -> CalibratedGate:
        if tenant not in self._gates:
            policy = self._policies.get(tenant, self._policy)
            self._gates[tenant] = CalibratedGate(self.calibration, policy, tenant, **self._options)
        return self._gates[tenant]

    @torch.no_grad()
    def _attempt(self, request: Request, plan: RepairPlan, gate: CalibratedGate) -> Request:
        """The request judged with `plan`, from the stage on where that plan first matters."""
        pair = self._bridge.pair
        prepared = self._bridge.prepare([stages.replan(pair, request, plan)])
        return stages.judge(pair, stages.repair(pair, prepared), gate)[0]

    def _shared(self, before: Request, request: Request) -> dict[str, int]:
        """FLOPs by part that this attempt took over from the one before it."""
        if before.features is None or request.features is not before.features:
            return {}
        parts = request_parts(self._bridge.pair, request)
        shared = {"prefill": parts["prefill"]}
        if request.rotated is not None and request.rotated is before.rotated:
            shared["translate"] = parts["translate"]
        return shared

    def _climbs(self, decision: Decision) -> bool:
        """Whether another plan may do better: only a score that is too high asks for one."""
        if decision.accepted or decision.reason != "gate_refused":
            return False
        return decision.score is None or decision.score > self.calibration.stop
