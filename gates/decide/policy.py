"""The gate at run time: fail closed, per tenant, in shadow or switched off; and the repair ladder around it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbridge.asset.folder import Asset
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.errors import UsageError
from kvbridge.gates.decide.audit import Log, kept, record_of
from kvbridge.gates.decide.sealed import Calibration, Rung
from kvbridge.gates.signals import SIGNALS, parts_of
from kvbridge.gates.signals.reading import Inapplicable, Reading
from kvbridge.handoff.bridge import Bridge
from kvbridge.handoff.cost import Speed, prefill_flops
from kvbridge.handoff.decision import Decision, discard
from kvbridge.handoff.evidence import Evidence
from kvbridge.handoff.plan import RepairPlan
from kvbridge.handoff.result import Handoff
from kvbridge.model.model import Model

EXPECTED = (torch.OutOfMemoryError, MemoryError, OSError)


@dataclass(frozen=True)
class Policy:
    """What one tenant allows. `enabled`: off means every handoff is a prefill. `shadow`: decide and log, always prefill.
    `strict_only`: nothing below `use`. `timeout_ms`: for all signals of one decision. `valid_until`: seconds since 1970
    after which the calibration counts as stale. None: no limit.
    """

    enabled: bool = True
    shadow: bool = False
    strict_only: bool = False
    timeout_ms: float | None = None
    valid_until: float | None = None

    def __post_init__(self) -> None:
        if self.timeout_ms is not None and (
            type(self.timeout_ms) not in (int, float) or not self.timeout_ms > 0
        ):
            raise UsageError(
                f"expected timeout_ms as a number above 0 or None, found {self.timeout_ms!r:.40}"
            )
        until = self.valid_until
        if until is not None and (type(until) not in (int, float) or not math.isfinite(until)):
            raise UsageError(
                f"expected valid_until as a finite number of seconds since 1970 or None, found {until!r:.40}"
            )


def file_switch(path: str | Path) -> Callable[[], bool]:
    """A kill switch for operators: on as long as nothing stands at `path`, not even a dangling link. It raises OSError where
    that cannot be told, which switches off."""

    def on() -> bool:
        try:
            os.lstat(path)
        except FileNotFoundError:
            return True
        return False

    return on


@dataclass(eq=False)
class CalibratedGate:
    """Decides by a calibration: `use` under its strict threshold, `use_approximate` above that and under the lenient one,
    whose risk is of both verdicts together, not of `use_approximate` alone. Nothing about a request raises: expected faults (no memory, an operating-system error, a
    signal that does not apply, NaN, time) are a Decision(discard) with their reason. A bug raises. `log` gets one record per
    request, of those that are decided without the gate, too (`note`).

    `calibration` None: uncalibrated. `speed`: of this device, so that decisions predict milliseconds. `switch`: False, or an
    OSError, ends all use at once. `log` may raise OSError, which refuses; whatever else it raises counts as a bug. `clock`,
    `now`: monotonic and wall seconds.
    """

    calibration: Calibration | None
    policy: Policy = field(default_factory=Policy)
    tenant: str = ""
    log: Log | None = None
    switch: Callable[[], bool] = lambda: True
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    speed: Speed | None = None

    def decide(self, evidence: Evidence) -> Decision:
        """The decision on one translated cache; it is logged before it is returned."""
        values: dict[str, float] = {}
        spent: dict[str, int] = {}
        decision = self._refused(evidence) or self._judged(evidence, values, spent)
        parts = {**evidence.parts, "gate": sum(spent.values())}
        ms = None if self.speed is None else self.speed.ms(parts)
        digest = None if self.calibration is None else self.calibration.digest
        decision = replace(
            decision, calibration=digest, predicted_flops=sum(parts.values()), predicted_ms=ms
        )
        final = self._shadowed(decision)
        return self._logged(
            final,
            decision,
            evidence.snapshot,
            len(evidence.ids),
            evidence.plan,
            signals=values,
            gate_flops=sum(spent.values()),
        )

    def note(
        self, decision: Decision, snapshot: KVSnapshot, ids: Tensor, plan: RepairPlan
    ) -> Decision:
        """Logs a decision made without the gate: a refusal before it, or an exact handoff, which the kill switch, a tenant
        that is off and shadow mode refuse like any other. `ids` `[tokens]`: the receiver's prompt."""
        if decision.accepted and (off := self._off()) is not None:
            decision = replace(off, predicted_flops=decision.predicted_flops)
        return self._logged(
            self._shadowed(decision), decision, snapshot, len(ids), plan, signals=None, gate_flops=0
        )

    def _shadowed(self, decision: Decision) -> Decision:
        if not self.policy.shadow or not decision.accepted:
            return decision
        return replace(
            decision,
            verdict="discard",
            reason="disabled",
            detail=f"shadow: would be {decision.verdict}",
        )

    def _off(self) -> Decision | None:
        """A refusal where the tenant or the kill switch allows no use at all."""
        if not self.policy.enabled:
            return discard("disabled", f"tenant {self.tenant!r} does not use translations")
        try:
            if not self.switch():
                return discard("disabled", "switched off")
        except OSError as error:
            return discard(
                "disabled",
                f"the kill switch could not be read: {type(error).__name__}: {error}"[:300],
            )
        return None

    def _refused(self, evidence: Evidence) -> Decision | None:
        """What is known before any signal is read."""
        if (off := self._off()) is not None:
            return off
        calibration, policy = self.calibration, self.policy
        if calibration is None:
            return discard("uncalibrated", "no calibration was given; run kvbridge gate calibrate")
        if policy.valid_until is not None and not self.now() <= policy.valid_until:
            return discard(
                "uncalibrated", "the calibration is stale: its time is over; calibrate again"
            )
        if evidence.asset is None or evidence.asset.digest != calibration.translator:
            return discard(
                "uncalibrated", "the calibration is of another translator; calibrate again"
            )
        found = (evidence.sender.geometry.digest, evidence.receiver.geometry.digest)
        if found != (calibration.sender, calibration.receiver):
            return discard(
                "contract_mismatch", "a model differs from the one the gate was calibrated for"
            )
        if evidence.snapshot.geometry.digest != calibration.sender:
            return discard(
                "wrong_pair", "the snapshot is of another model than the gate was calibrated for"
            )
        if not calibration.usable:
            return discard("uncalibrated", calibration.refusal)
        return None

    def _judged(
        self, evidence: Evidence, values: dict[str, float], spent: dict[str, int]
    ) -> Decision:
        """Reads signals into `values` and their FLOPs into `spent` (both are filled), then decides."""
        calibration = self.calibration
        assert calibration is not None
        rung = calibration.rung(evidence.plan)
        if rung is None:
            return discard(
                "uncalibrated", f"{evidence.plan} is none of the calibrated repair plans"
            )
        reading = Reading(evidence, calibration.extras, spent, parts_of(calibration.signals))
        start, limit = self.clock(), self.policy.timeout_ms
        try:
            with torch.no_grad():
                for name in calibration.signals:
                    found = SIGNALS[name].read(reading)
                    values.update(zip(SIGNALS[name].columns, found, strict=True))
                    if limit is not None and not 1000 * (self.clock() - start) <= limit:
                        return discard("timeout", f"{name} ended after more than {limit:g} ms")
        except Inapplicable as error:
            return discard("fault", f"{name}: {error}")
        except EXPECTED as error:
            return discard("fault", f"{name}: {type(error).__name__}: {error}"[:300])
        bad = [c for c, v in values.items() if not math.isfinite(v)]
        if bad:
            return discard("not_finite", f"the signal {bad[0]}")
        return self._verdict(rung, values)

    def _verdict(self, rung: Rung, values: Mapping[str, float]) -> Decision:
        calibration = self.calibration
        assert calibration is not None
        score = rung.score(values)
        for column, limit in rung.limits.items():
            if not values[column] <= limit:
                text = f"{column} is {values[column]:.3g}, above {limit:.3g}: this cache is not of this text"
                return Decision("discard", "gate_refused", text, score=1.0)
        strict, lenient = calibration.strict, calibration.lenient
        if strict is not None and score <= strict.threshold:
            return Decision("use", "gate_strict", score=score, threshold=strict.threshold)
        if lenient is not None and not self.policy.strict_only and score <= lenient.threshold:
            return Decision(
                "use_approximate", "gate_lenient", score=score, threshold=lenient.threshold
            )
        allowed = [
            t.threshold
            for t in ((strict,) if self.policy.strict_only else (strict, lenient))
            if t is not None
        ]
        if not allowed:
            return discard("uncalibrated", calibration.refusal)
        return Decision("discard", "gate_refused", score=score, threshold=max(allowed))

    def _logged(
        self,
        final: Decision,
        decided: Decision,
        snapshot: KVSnapshot,
        tokens: int,
        plan: RepairPlan,
        **gate: Any,
    ) -> Decision:
        if self.log is None:
            return final
        digest = None if self.calibration is None else self.calibration.digest
        record = record_of(
            final,
            decided,
            snapshot,
            tokens,
            plan,
            **gate,
            calibration=digest,
            tenant=self.tenant,
            shadow=self.policy.shadow,
            time=self.now(),
        )
        return kept(self.log, record, final)


class Ladder:
    """Tries repair plans, cheapest first, up to where a prefill takes fewer FLOPs, and ends on the first whose score is at
    most `calibration.stop`, accepted there or not: the rule that its thresholds were calibrated under, whatever the device
    and the policy.

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
        """The handoff of the rung that the request ends on, else the last refusal; its decision counts FLOPs and milliseconds of all attempts."""
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
