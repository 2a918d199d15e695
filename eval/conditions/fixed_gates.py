"""Gates that look at nothing: the two ends between which a calibrated gate has to prove itself."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.handoff.decision import Decision, Verdict
from kvbridge.handoff.evidence import Evidence


@dataclass(frozen=True)
class FixedGate:
    """Says `verdict` to every cache: `use_approximate` is a translation without a gate, `discard` a
    prefill that has paid for a translation as well."""

    name: str
    verdict: Verdict

    def decide(self, evidence: Evidence) -> Decision:
        """The same for every request, without a score."""
        if self.verdict == "discard":
            return Decision("discard", "gate_refused", f"the gate {self.name} looks at nothing")
        return Decision(self.verdict, "ungated", f"the gate {self.name} looks at nothing")


FIXED_GATES = {
    gate.name: gate
    for gate in (
        FixedGate("always-accept", "use_approximate"),
        FixedGate("always-refuse", "discard"),
    )
}
