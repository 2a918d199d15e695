"""The gate at run time: fail closed, per tenant, in shadow or switched off."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.gates.decide.audit import Log, kept, record_of
from kvbridge.gates.decide.policy import Policy
from kvbridge.gates.decide.sealed import Calibration, Rung
from kvbridge.gates.signals import SIGNALS, parts_of
from kvbridge.gates.signals.reading import Inapplicable, Reading
from kvbridge.handoff.cost import Speed
from kvbridge.handoff.decision import Decision, discard
from kvbridge.handoff.evidence import Evidence
from kvbridge.handoff.plan import RepairPlan

EXPECTED_FAULTS = (torch.OutOfMemoryError, MemoryError, OSError)


@dataclass(eq=False)
class CalibratedGate:
    """Decides by a calibration: `use` under its strict threshold, `use_approximate` above that and
    under the lenient one, whose risk is of both verdicts together, not of `use_approximate` alone.
    Nothing about a request raises: expected faults (no memory, an operating-system error, a signal
    that does not apply, NaN, time) are a Decision(discard) with their reason. A bug raises. `log`
    gets one record per request, of those that are decided without the gate, too (`note`).

    `calibration` None: uncalibrated. `speed`: of this device, so that decisions predict
    milliseconds. `switch`: False, or an OSError, ends all use at once. `log` may raise OSError,
    which refuses; whatever else it raises counts as a bug. `clock`, `now`: monotonic and wall
    seconds.
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
        """Logs a decision made without the gate: a refusal before it, or an exact handoff, which
        the kill switch, a tenant that is off and shadow mode refuse like any other. `ids`
        `[tokens]`: the receiver's prompt."""
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
        models = (evidence.sender.geometry.digest, evidence.receiver.geometry.digest)
        if models != (calibration.sender, calibration.receiver):
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
        """Reads signals into `values` and their FLOPs into `spent` (both are filled), then
        decides."""
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
                    signal = SIGNALS[name]
                    values.update(zip(signal.columns, signal.read(reading), strict=True))
                    if limit is not None and not 1000 * (self.clock() - start) <= limit:
                        return discard("timeout", f"{name} ended after more than {limit:g} ms")
        except Inapplicable as error:
            return discard("fault", f"{name}: {error}")
        except EXPECTED_FAULTS as error:
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
                text = (
                    f"{column} is {values[column]:.3g}, above {limit:.3g}: "
                    "this cache is not of this text"
                )
                return Decision("discard", "gate_refused", text, score=1.0)
        strict, lenient = calibration.strict, calibration.lenient
        if strict is not None and score <= strict.threshold:
            return Decision("use", "gate_strict", score=score, threshold=strict.threshold)
        if lenient is not None and not self.policy.strict_only and score <= lenient.threshold:
            return Decision(
                "use_approximate", "gate_lenient", score=score, threshold=lenient.threshold
            )
        levels = (strict,) if self.policy.strict_only else (strict, lenient)
        thresholds = [level.threshold for level in levels if level is not None]
        if not thresholds:
            return discard("uncalibrated", calibration.refusal)
        return Decision("discard", "gate_refused", score=score, threshold=max(thresholds))

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
