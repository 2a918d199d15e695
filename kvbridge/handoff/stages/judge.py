"""What may be done with each cache: the gate's word, or what stands without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvbridge.errors import UsageError
from kvbridge.handoff.decision import Decision
from kvbridge.handoff.evidence import Evidence
from kvbridge.handoff.pair import Pair
from kvbridge.handoff.ports import Gate, NotingGate
from kvbridge.handoff.request import Request, after


def judge(pair: Pair, requests: Sequence[Request], gate: Gate | None = None) -> list[Request]:
    """Fills in `decision`, of refused requests, too: their refusal, after a NotingGate has heard of
    it.

    Exact caches are used; others are the gate's to decide, which expects observed requests (without
    a gate: `use_approximate`). Costs what the gate reads. Raises what a broken gate raises, and
    UsageError where its note turns a refusal into a use.
    """
    return [
        replace(r, decision=_judged(pair, r, gate)) if r.decision is None else r for r in requests
    ]


def _judged(pair: Pair, request: Request, gate: Gate | None) -> Decision:
    if request.refusal is not None:
        return _noted(gate, request.refusal, request)
    evidence = Evidence(pair, request)
    after("repair", request.repaired)
    flops = evidence.predicted_flops
    if evidence.exact_layers == len(pair.receiver.geometry.layers):
        return _noted(gate, Decision("use", "exact", predicted_flops=flops), request)
    if gate is None:
        return Decision("use_approximate", "ungated", predicted_flops=flops)
    if not request.observed:
        raise UsageError("expected observed requests for a gate")
    decision = gate.decide(evidence)
    if decision.predicted_flops is None:
        return replace(decision, predicted_flops=flops)
    return decision


def _noted(gate: Gate | None, decision: Decision, request: Request) -> Decision:
    """A decision that the gate had no part in, after the gate took note of it where it does."""
    if not isinstance(gate, NotingGate):
        return decision
    noted = gate.note(decision, request.snapshot, request.encoding.ids, request.plan)
    if noted.accepted and not decision.accepted:
        raise UsageError(
            f"expected a gate's note to keep the refusal {decision.reason}, found {noted.verdict}"
        )
    return noted
