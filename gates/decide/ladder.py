"""The repair ladder around a gate: cheap repair plans first, dearer ones where the score asks for
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvbridge.asset.folder import Asset
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.gates.decide.gate import CalibratedGate
from kvbridge.gates.decide.policy import Policy
from kvbridge.gates.decide.sealed import Calibration, Rung
from kvbridge.handoff.bridge import Bridge
from kvbridge.handoff.cost import Speed, prefill_flops
from kvbridge.handoff.result import Handoff
from kvbridge.model.model import Model


class Ladder:
    """Tries repair plans, cheapest first, up to where a prefill takes fewer FLOPs, and ends on the
    first whose score is at most `calibration.stop`, accepted there or not: the rule that its
    thresholds were calibrated under, whatever the device and the policy.

    `policies`: by tenant; another tenant gets `policy`. Everything else goes to CalibratedGate.
    """

    def __init__(
        self,
        asset: Asset,
        *,
        sender: Model,
        receiver: Model,
        calibration: Calibration,
        policy: Policy | None = None,
        policies: Mapping[str, Policy] | None = None,
        ledger: Any = None,
        speed: Speed | None = None,
        **gate: Any,
    ) -> None:
        self.calibration, self.receiver = calibration, receiver
        self._make = lambda tenant: Bridge(
            asset,
            sender=sender,
            receiver=receiver,
            ledger=ledger,
            gate=CalibratedGate(
                calibration,
                (policies or {}).get(tenant, policy or Policy()),
                tenant,
                speed=speed,
                **gate,
            ),
        )
        self._bridges: dict[str, Bridge] = {}

    def handoff(self, snapshot: KVSnapshot, text: str, *, tenant: str = "") -> Handoff:
        """The handoff of the rung that the request ends on, else the last refusal; its decision
        counts FLOPs and milliseconds of all attempts."""
        return self.climb(snapshot, text, tenant=tenant)[0]

    def climb(self, snapshot: KVSnapshot, text: str, *, tenant: str = "") -> tuple[Handoff, Rung]:
        """The same, with the rung that the request ended on."""
        bridge = self._bridges.setdefault(tenant, self._make(tenant))
        dense = prefill_flops(self.receiver.geometry, len(self.receiver.encode(text)))
        spent, spent_ms, last = 0, 0.0, 0
        handoff: Handoff | None = None
        ended = self.calibration.rungs[0]
        for rung in self.calibration.rungs:
            if handoff is not None and spent + last >= dense:
                break
            ended = rung
            handoff = bridge.handoff(snapshot, text, repair=rung.plan)
            decision = handoff.decision
            last = decision.predicted_flops or 0
            spent += last
            spent_ms += decision.predicted_ms or 0.0
            score = decision.score
            climbs = decision.reason == "gate_refused" and (
                score is None or score > self.calibration.stop
            )
            if decision.accepted or not climbs:
                break
        assert handoff is not None
        total = replace(
            handoff.decision, predicted_flops=spent or None, predicted_ms=spent_ms or None
        )
        return replace(handoff, decision=total), ended
