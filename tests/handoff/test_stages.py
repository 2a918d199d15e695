"""The handoff's stages, each called by itself on what the one before gives."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbridge import Bridge, Decision, Evidence, RepairPlan, capture
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.errors import UsageError
from kvbridge.handoff.decision import discard
from kvbridge.handoff.pair import Pair
from kvbridge.handoff.ports import Resident
from kvbridge.handoff.request import Request
from kvbridge.handoff.stages import (
    align,
    assemble,
    check,
    features,
    judge,
    repair,
    replan,
    rotate,
    translate,
)
from tests.handoff.handoffs import identity, renamed
from tests.models import TEXT, tiny

RECEIVER = tiny("llama", 1)
SENDER = tiny("llama")
PLAN = RepairPlan(sinks=2, tail=6, layers=1)


def pair() -> Pair:
    return Pair.of(identity(SENDER, RECEIVER, "hidden:1"), SENDER, RECEIVER)


PAIR = pair()
RESIDENT = Resident(PAIR.receiver)
STAGES: dict[str, Any] = {
    "check": check,
    "align": align,
    "features": features,
    "translate": lambda pair, requests: translate(pair, requests, RESIDENT),
    "rotate": rotate,
    "repair": repair,
}
PARTS = {
    "align": "aligned",
    "features": "features",
    "translate": "translation",
    "rotate": "rotated",
    "repair": "repaired",
}


def request(text: str = TEXT, **changes: Any) -> Request:
    made = Request(capture(SENDER, text), text, PAIR.receiver.encode(text), PLAN)
    return replace(made, **changes)


def until(stage: str, *requests: Request) -> list[Request]:
    """The requests after every stage up to and with `stage`."""
    done = list(requests)
    for name, run in STAGES.items():
        done = run(PAIR, done)
        if name == stage:
            break
    return done


def before(stage: str, *requests: Request) -> list[Request]:
    names = list(STAGES)
    at = names.index(stage)
    return until(names[at - 1], *requests) if at else list(requests)


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in a value of dataclasses, dicts and lists, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    elif hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in tensors(one)]
    return []


def assert_alike(one: Any, other: Any, tolerance: float = 0.0) -> None:
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    assert pairs
    for a, b in pairs:
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_fills_in_its_part_and_modifies_nothing(stage):
    (given,) = before(stage, request(observed=True))
    copies = [t.clone() for t in tensors(given)]
    (done,) = STAGES[stage](PAIR, [given])
    assert all(torch.equal(a, b) for a, b in zip(tensors(given), copies, strict=True))
    assert done.refusal is None
    changed = {
        f.name for f in fields(Request) if getattr(done, f.name) is not getattr(given, f.name)
    }
    expected = {PARTS[stage]} if stage in PARTS else set()
    assert changed == expected | ({"translation"} if stage == "rotate" else set())
    (again,) = STAGES[stage](PAIR, [done])
    assert again is done, "what is there already is left alone"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("observed", [False, True])
def test_batched_equals_one_by_one(stage, observed):
    plans = (PLAN, RepairPlan(tail=20), RepairPlan(sinks=0, layers=0), PLAN)
    texts = (TEXT, TEXT[:90], TEXT[:140], TEXT[:200])
    each = [
        request(text, plan=plan, observed=observed) for text, plan in zip(texts, plans, strict=True)
    ]
    together = until(stage, *each)
    alone = [until(stage, one)[0] for one in each]
    for one, other in zip(together, alone, strict=True):
        assert one.refusal is other.refusal is None
        if stage in PARTS:
            # Layers that only another request of the batch has exact are translated beside.
            part, own = getattr(one, PARTS[stage]), getattr(other, PARTS[stage])
            if stage == "translate":
                assert torch.equal(part.rows, own.rows)
                part, own = ({k: x.content[k] for k in own.content} for x in (part, own))
            assert_alike(part, own, 1e-4)


@pytest.mark.parametrize("stage", [*STAGES])
def test_a_refused_request_passes_untouched(stage):
    refused = request(refusal=discard("disabled"))
    (good,) = before(stage, request())
    first, done, last = STAGES[stage](PAIR, [refused, good, refused])
    assert first is last is refused
    if stage != "check":
        assert done is not good


def test_a_stage_without_the_one_before_is_misuse():
    for stage, missing in (
        ("features", "align"),
        ("translate", "features"),
        ("rotate", "translate"),
        ("repair", "rotate"),
    ):
        with pytest.raises(UsageError, match=f"been through {missing}"):
            STAGES[stage](PAIR, [request()])
    with pytest.raises(UsageError, match="been through"):
        judge(PAIR, until("rotate", request()))
    with pytest.raises(UsageError, match="been through judge"):
        assemble(PAIR, until("repair", request()))


def test_shapes_along_the_line():
    (done,) = until("translate", request())
    count = done.cached
    assert done.aligned.alignment.covered.shape == done.aligned.alignment.index.shape == (count,)
    assert done.aligned.chosen.tolist() == [0, 1, *range(count - 5, count)]
    assert done.features.hidden.shape == (count, 48)
    assert [len(layer["k"]) for layer in done.features.first.layers] == [count]
    assert done.features.exact_layers == 1
    assert done.translation.rows.tolist() == list(range(2, count - 5))
    assert sorted(done.translation.content) == [1, 2, 3]
    assert done.translation.content[2]["k"].shape == (count - 7, 2, 16)
    assert done.translation.content[2]["k"].dtype == torch.float32
    (turned,) = rotate(PAIR, [done])
    assert len(turned.rotated.layers) == 4
    assert turned.rotated.layers[3]["v"].shape == (count, 2, 16)
    assert not turned.rotated.layers[3]["v"][0].any(), "not translated and not yet computed"
    (own,) = repair(PAIR, [turned])
    assert own.repaired.layers[3]["v"][0].any()
    assert own.repaired.forward.queries is None


class Accepting:
    def __init__(self) -> None:
        self.seen: list[Evidence] = []
        self.heard: list[Decision] = []

    def decide(self, evidence: Evidence) -> Decision:
        self.seen.append(evidence)
        return Decision("use", "gate_strict", score=0.25)

    def note(
        self, decision: Decision, snapshot: KVSnapshot, ids: Tensor, plan: RepairPlan
    ) -> Decision:
        self.heard.append(decision)
        return decision


def test_judge_asks_the_gate_and_tells_it_of_refusals():
    gate, refusal = Accepting(), discard("disabled")
    given = until("repair", request(observed=True), request(refusal=refusal))
    good, refused = judge(PAIR, given, gate)
    assert [d.decision for d in given] == [None, None]
    (evidence,) = gate.seen
    assert good.decision == Decision(
        "use", "gate_strict", score=0.25, predicted_flops=evidence.predicted_flops
    )
    assert refused.decision is refusal
    assert gate.heard == [refusal]
    used, dense = assemble(PAIR, [good, refused])
    assert used.layers is good.repaired.layers
    assert dense.layers is None
    assert (used.receiver, dense.receiver) == (RECEIVER, RECEIVER)
    with pytest.raises(UsageError, match="observed"):
        judge(PAIR, until("repair", request()), gate)


def test_the_stages_are_the_bridge():
    bridge = Bridge(PAIR.handle, sender=SENDER, receiver=RECEIVER)
    handoff = bridge.handoff(capture(SENDER, TEXT), TEXT, repair=PLAN)
    (own,) = assemble(PAIR, judge(PAIR, until("repair", request())))
    assert own.decision == handoff.decision
    assert own.provenance == handoff.provenance
    assert_alike(own.layers, handoff.layers)


def test_evidence_is_a_view():
    (done,) = until("repair", request(observed=True))
    evidence = Evidence(PAIR, done)
    assert (evidence.sender, evidence.receiver, evidence.asset) == (SENDER, RECEIVER, None)
    assert evidence.translated is done.rotated.layers
    assert evidence.repaired is done.repaired.layers
    assert evidence.features is done.features.hidden
    assert evidence.states.shape == (len(done.aligned.chosen) + 1, 48)
    assert evidence.queries.at(3, torch.tensor([0]), torch.tensor([0])).shape == (1, 4, 16)
    assert evidence.predicted_flops == sum(evidence.parts.values()) > 0
    (unobserved,) = until("repair", request())
    with pytest.raises(UsageError, match="observed"):
        _ = Evidence(PAIR, unobserved).queries


OTHER_PLANS = {
    "longer tail": RepairPlan(sinks=2, tail=20),
    "tokens": RepairPlan(sinks=2, tail=6, tokens=(9, 30)),
    "shorter tail": RepairPlan(sinks=2, tail=3),
    "layers": RepairPlan(sinks=2, tail=6, layers=2),
}


@pytest.mark.parametrize("name", OTHER_PLANS)
@pytest.mark.parametrize("observed", [False, True])
def test_another_plan_goes_back_no_further_than_it_must(name, observed):
    """And ends on the same as that plan from the start, with the same costs."""
    plan = OTHER_PLANS[name]
    (done,) = until("repair", request(observed=observed))
    copies = [t.clone() for t in tensors(done)]
    again = replan(PAIR, done, plan)
    assert again.plan == plan
    assert again.repaired is None
    kept = name in ("longer tail", "tokens") or (name == "shorter tail" and observed)
    assert (again.rotated is done.rotated) == kept
    assert (again.features is done.features) == (name != "layers")
    assert again.aligned.alignment is done.aligned.alignment
    (last,) = until("repair", again)
    (fresh,) = until("repair", request(observed=observed, plan=plan))
    assert_alike(last.repaired.layers, fresh.repaired.layers, 1e-4)
    assert Evidence(PAIR, last).parts == Evidence(PAIR, fresh).parts
    assert all(torch.equal(a, b) for a, b in zip(tensors(done), copies, strict=True))


def test_another_plan_for_a_refused_request():
    (refused,) = until("repair", request(plan=RepairPlan(tail=500)))
    assert refused.refusal.reason == "too_short"
    again = replan(PAIR, refused, PLAN)
    assert again.refusal is None
    assert until("repair", again)[0].repaired is not None
    (done,) = until("repair", request())
    assert replan(PAIR, done, RepairPlan(tail=500)).refusal.reason == "too_short"
    with pytest.raises(UsageError, match="is a prefill"):
        replan(PAIR, done, RepairPlan(layers=4))
    with pytest.raises(UsageError, match="is a prefill"):
        check(PAIR, [request(plan=RepairPlan(layers=4))])


class Counted:
    """A receiver whose forwards are counted."""

    def __init__(self, bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name in ("first_layers", "repair"):
            real = getattr(type(bridge.pair.receiver), name)
            monkeypatch.setattr(type(bridge.pair.receiver), name, self._counting(name, real))

    def _counting(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return real(*args, **kwargs)

        return call


def test_a_ladder_translates_once(monkeypatch):
    sender = renamed(RECEIVER)
    bridge = Bridge(identity(sender, RECEIVER, "hidden:1"), sender=sender, receiver=RECEIVER)
    counted = Counted(bridge, monkeypatch)
    prepared = bridge.prepare([bridge.request(capture(sender, TEXT), TEXT)])
    handoffs = []
    for tail in (1, 8, 16):
        prepared = bridge.prepare([replan(bridge.pair, prepared[0], RepairPlan(tail=tail))])
        handoffs += bridge.finish(prepared)
    assert counted.calls == ["first_layers", "repair", "repair", "repair"]
    for tail, handoff in zip((1, 8, 16), handoffs, strict=True):
        alone = bridge.handoff(capture(sender, TEXT), TEXT, repair=RepairPlan(tail=tail))
        assert alone.decision == handoff.decision
        assert alone.provenance == handoff.provenance
        assert_alike(alone.layers, handoff.layers)
