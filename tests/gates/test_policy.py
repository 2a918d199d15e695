"""Fail closed: every expected fault ends in the receiver's own dense result, with its reason; bugs raise."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import kvbridge
from kvbridge import RepairPlan
from kvbridge.gates import policy as policies
from kvbridge.gates.audit import Counters, JsonLines, both
from kvbridge.gates.guarantee import Tested as Passed
from kvbridge.gates.policy import CalibratedGate, Ladder, Policy, file_switch
from kvbridge.gates.sealed import Rung
from kvbridge.gates.signals import SIGNALS
from kvbridge.gates.signals.base import Signal
from tests.gates.conftest import PLAN, made_calibration


def raising(error):
    def read(reading):
        raise error

    return read


def gate_of(pair, **changes):
    options = {k: changes.pop(k) for k in list(changes) if k in ("policy", "log", "switch", "clock", "now", "tenant")}
    return CalibratedGate(made_calibration(pair, **changes), **options)


def handed(pair, gate, snapshot=None, text=None, plan=PLAN):
    text = text or pair.texts[0]
    snapshot = snapshot if snapshot is not None else kvbridge.capture(pair.sender, text)
    return pair.bridge(gate).handoff(snapshot, text, repair=plan)


def assert_dense(pair, handoff, reason):
    assert (handoff.decision.verdict, handoff.decision.reason) == ("discard", reason), str(handoff.decision)
    assert handoff.layers is None
    assert handoff.cached == 0
    assert torch.equal(handoff.remaining_ids[0], handoff.ids)
    assert handoff.provenance.fidelity == "exact"
    dense = pair.receiver.model.generate(handoff.ids[None], max_new_tokens=4, do_sample=False)
    assert torch.equal(handoff.generate(4, do_sample=False), dense)


def ticking(step):
    at = [0.0]

    def clock():
        at[0] += step
        return at[0]

    return clock


def with_signal(monkeypatch, read):
    monkeypatch.setitem(SIGNALS, "length", Signal(("length",), read, (), "x"))


def poisoned(pair):
    snapshot = kvbridge.capture(pair.sender, pair.texts[0])
    layers = [dict(x) for x in snapshot.layers]
    layers[-1] = {**layers[-1], "v": layers[-1]["v"].clone()}
    layers[-1]["v"][20] = float("nan")
    return replace(snapshot, layers=tuple(layers))


SETTINGS = {
    "no calibration": (lambda p: CalibratedGate(None), "uncalibrated"),
    "nothing holds": (lambda p: gate_of(p, strict=None, lenient=None), "uncalibrated"),
    "another translator": (lambda p: gate_of(p, translator="0" * 64), "uncalibrated"),
    "changed sender": (lambda p: gate_of(p, sender="0" * 64), "contract_mismatch"),
    "changed receiver": (lambda p: gate_of(p, receiver="0" * 64), "contract_mismatch"),
    "stale": (lambda p: gate_of(p, policy=Policy(valid_until=10.0), now=lambda: 11.0), "uncalibrated"),
    "tenant off": (lambda p: gate_of(p, policy=Policy(enabled=False)), "disabled"),
    "kill switch": (lambda p: gate_of(p, switch=lambda: False), "disabled"),
    "shadow": (lambda p: gate_of(p, policy=Policy(shadow=True)), "disabled"),
    "timeout": (lambda p: gate_of(p, policy=Policy(timeout_ms=5), clock=ticking(0.004)), "timeout"),
    "strict only": (lambda p: gate_of(p, policy=Policy(strict_only=True)), "uncalibrated"),
    "score above": (lambda p: gate_of(p, lenient=Passed(0.4, 400, 1, 0.01)), "gate_refused"),
    "limit passed": (lambda p: gate_of(p, rungs=(replace(made_calibration(p).rungs[0], limits={"length": 0.1}),)), "gate_refused"),
    "log on a full disk": (lambda p: gate_of(p, log=raising(OSError(28, "No space left on device"))), "fault"),
    "log cannot be opened": (lambda p: gate_of(p, log=JsonLines("/proc/nothing/log")), "fault"),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_end_in_the_dense_result(pair, name):
    make, reason = SETTINGS[name]
    assert_dense(pair, handed(pair, make(pair)), reason)


SIGNAL_FAULTS = {
    "no memory on the device": (raising(torch.OutOfMemoryError("out of memory")), "fault"),
    "no memory": (raising(MemoryError()), "fault"),
    "file gone": (raising(FileNotFoundError(2, "gone")), "fault"),
    "time out of a socket": (raising(TimeoutError("slow")), "fault"),
    "connection": (raising(ConnectionResetError(104, "reset")), "fault"),
    "nan": (lambda reading: (float("nan"),), "not_finite"),
    "infinity": (lambda reading: (float("inf"),), "not_finite"),
}


@pytest.mark.parametrize("name", SIGNAL_FAULTS)
def test_signal_faults_end_in_the_dense_result(pair, monkeypatch, name):
    read, reason = SIGNAL_FAULTS[name]
    with_signal(monkeypatch, read)
    assert_dense(pair, handed(pair, gate_of(pair)), reason)


def holes(pair):
    snapshot = kvbridge.capture(pair.sender, pair.texts[0])
    return snapshot.select(torch.tensor([i for i in range(len(snapshot)) if i != 9]))


REQUESTS = {
    "another document": (lambda p: p.wrong()[0], PLAN, "gate_refused"),
    "nan in the cache": (poisoned, PLAN, "not_finite"),
    "holes": (holes, PLAN, "fault"),
    "another text": (lambda p: kvbridge.capture(p.sender, p.texts[3]), PLAN, "text_mismatch"),
    "another model": (lambda p: kvbridge.capture(p.receiver, p.texts[0]), PLAN, "wrong_pair"),
    "a plan not calibrated": (lambda p: None, RepairPlan(sinks=2, tail=12), "uncalibrated"),
    "a tail too short": (lambda p: None, RepairPlan(sinks=2, tail=1), "uncalibrated"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_end_in_the_dense_result(pair, name):
    make, plan, reason = REQUESTS[name]
    assert_dense(pair, handed(pair, gate_of(pair), make(pair), plan=plan), reason)


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), KeyError("a bug"), RuntimeError("a bug"), AssertionError("a bug")]
)
def test_a_bug_raises(pair, monkeypatch, error):
    with_signal(monkeypatch, raising(error))
    with pytest.raises(type(error), match="a bug"):
        handed(pair, gate_of(pair))


def test_accepting(pair):
    lenient = handed(pair, gate_of(pair)).decision
    assert (lenient.verdict, lenient.reason, lenient.score, lenient.threshold) == (
        "use_approximate",
        "gate_lenient",
        0.5,
        0.6,
    )
    strict = handed(pair, gate_of(pair, strict=Passed(0.55, 400, 0, 0.01))).decision
    assert (strict.verdict, strict.threshold) == ("use", 0.55)
    ungated = pair.bridge().handoff(kvbridge.capture(pair.sender, pair.texts[0]), pair.texts[0], repair=PLAN).decision
    assert lenient.predicted_flops > ungated.predicted_flops, "the gate's own work is counted"


def test_one_line_per_decision_and_counters(pair, tmp_path):
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    path = tmp_path / "log.jsonl"
    gate = gate_of(pair, log=both(JsonLines(path), Counters(registry)), tenant="a", now=lambda: 5.0)
    shadow = replace(gate, policy=Policy(shadow=True))
    decisions = [handed(pair, g).decision for g in (gate, shadow)]
    decisions.append(handed(pair, gate, pair.wrong()[0]).decision)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(x["verdict"], x["decided"]) for x in lines] == [
        ("use_approximate", "use_approximate"), ("discard", "use_approximate"), ("discard", "discard"),
    ]  # fmt: skip
    assert [x["reason"] for x in lines] == [d.reason for d in decisions]
    assert lines[0]["tenant"] == "a"
    assert lines[0]["time"] == 5.0
    assert lines[0]["signals"]["length"] > 0
    count = registry.get_sample_value(
        "kvbridge_gate_decisions_total", {"tenant": "a", "verdict": "discard", "reason": "gate_refused"}
    )
    assert count == 1
    assert registry.get_sample_value("kvbridge_gate_flops_total") == sum(x["gate_flops"] for x in lines)


def test_the_file_switch_acts_at_once(pair, tmp_path):
    gate = gate_of(pair, switch=file_switch(tmp_path / "off"))
    assert handed(pair, gate).decision.accepted
    (tmp_path / "off").touch()
    assert_dense(pair, handed(pair, gate), "disabled")


def ladder_of(pair, thresholds, **options):
    """A ladder of three tails; a request passes a rung where its tail is in `thresholds`."""
    base = made_calibration(pair)
    rungs = []
    for tail in (11, 21, 31):
        intercept = -5.0 if tail in thresholds else 5.0
        score = replace(base.rungs[0].score, intercept=intercept)
        rungs.append(Rung(RepairPlan(sinks=2, tail=tail), score, {}))
    return Ladder(
        pair.asset, sender=pair.sender, receiver=pair.receiver, calibration=replace(base, rungs=tuple(rungs)), **options
    )


def test_the_ladder_takes_the_first_rung_that_passes_and_pays_for_all(pair, monkeypatch):
    monkeypatch.setattr(policies, "prefill_flops", lambda *_: 1 << 40)
    text = pair.texts[0]
    snapshot = kvbridge.capture(pair.sender, text)
    costs = []
    for passing in ((11, 21, 31), (21, 31), ()):
        done = ladder_of(pair, passing).handoff(snapshot, text)
        costs.append(done.decision.predicted_flops)
        assert done.decision.accepted == bool(passing)
    assert costs[0] < costs[1] < costs[2]


def test_the_ladder_stops_where_a_prefill_is_cheaper(pair, monkeypatch):
    calls = []
    real = policies.Bridge.handoff

    def counted(self, *arguments, **options):
        calls.append(options["repair"].tail)
        return real(self, *arguments, **options)

    monkeypatch.setattr(policies.Bridge, "handoff", counted)
    text = pair.texts[0]
    ladder_of(pair, ()).handoff(kvbridge.capture(pair.sender, text), text)
    assert calls == [11]


def test_the_ladder_does_not_climb_after_another_refusal(pair):
    done = ladder_of(pair, (), policy=Policy(enabled=False)).handoff(
        kvbridge.capture(pair.sender, pair.texts[0]), pair.texts[0]
    )
    assert done.decision.reason == "disabled"


def test_tenants_have_their_own_policy(pair):
    ladder = ladder_of(pair, (11,), policies={"careful": Policy(strict_only=True), "off": Policy(enabled=False)})
    text = pair.texts[0]
    snapshot = kvbridge.capture(pair.sender, text)
    assert ladder.handoff(snapshot, text).decision.accepted
    assert not ladder.handoff(snapshot, text, tenant="careful").decision.accepted
    assert ladder.handoff(snapshot, text, tenant="off").decision.reason == "disabled"


def test_at_least_twenty_faults_are_injected():
    assert len(SETTINGS) + len(SIGNAL_FAULTS) + len(REQUESTS) >= 20
