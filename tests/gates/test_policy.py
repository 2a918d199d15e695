"""Fail closed: every expected fault ends in the receiver's own dense result, with its reason; bugs
raise."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import kvbridge
from kvbridge import RepairPlan
from kvbridge.errors import UsageError
from kvbridge.gates.decide import CalibratedGate, Policy, file_switch
from kvbridge.gates.decide.audit import Counters, JsonLines, both
from kvbridge.gates.decide.guarantee import Tested as Passed
from kvbridge.gates.signals import SIGNALS
from kvbridge.gates.signals.base import Signal
from tests.gates.conftest import PLAN, made_calibration


def raising(error):
    def read(*_):
        raise error

    return read


def gate_of(pair, **changes):
    options = {
        k: changes.pop(k)
        for k in list(changes)
        if k in ("policy", "log", "switch", "clock", "now", "tenant")
    }
    return CalibratedGate(made_calibration(pair, **changes), **options)


def handed(pair, gate, snapshot=None, text=None, plan=PLAN):
    text = text or pair.texts[0]
    snapshot = snapshot if snapshot is not None else kvbridge.capture(pair.sender, text)
    return pair.bridge(gate).handoff(snapshot, text, repair=plan)


def assert_dense(pair, handoff, reason):
    assert (handoff.decision.verdict, handoff.decision.reason) == ("discard", reason), str(
        handoff.decision
    )
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
    "stale": (
        lambda p: gate_of(p, policy=Policy(valid_until=10.0), now=lambda: 11.0),
        "uncalibrated",
    ),
    "tenant off": (lambda p: gate_of(p, policy=Policy(enabled=False)), "disabled"),
    "kill switch": (lambda p: gate_of(p, switch=lambda: False), "disabled"),
    "kill switch that cannot be read": (
        lambda p: gate_of(p, switch=raising(PermissionError(13, "denied"))),
        "disabled",
    ),
    "kill switch with a name too long": (
        lambda p: gate_of(p, switch=file_switch("/tmp/" + "x" * 300)),
        "disabled",
    ),
    "kill switch under a file": (
        lambda p: gate_of(p, switch=file_switch(f"{__file__}/off")),
        "disabled",
    ),
    "a clock of nan": (
        lambda p: gate_of(p, policy=Policy(valid_until=10.0), now=lambda: float("nan")),
        "uncalibrated",
    ),
    "shadow": (lambda p: gate_of(p, policy=Policy(shadow=True)), "disabled"),
    "timeout": (lambda p: gate_of(p, policy=Policy(timeout_ms=5), clock=ticking(0.004)), "timeout"),
    "strict only": (lambda p: gate_of(p, policy=Policy(strict_only=True)), "uncalibrated"),
    "score above": (lambda p: gate_of(p, lenient=Passed(0.4, 400, 1, 0.01)), "gate_refused"),
    "limit passed": (
        lambda p: gate_of(
            p, rungs=(replace(made_calibration(p).rungs[0], limits={"length": 0.1}),)
        ),
        "gate_refused",
    ),
    "log on a full disk": (
        lambda p: gate_of(p, log=raising(OSError(28, "No space left on device"))),
        "fault",
    ),
    "log cannot be opened": (lambda p: gate_of(p, log=JsonLines("/proc/nothing/log")), "fault"),
}


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "tomorrow", True])
def test_valid_until_is_a_finite_number(value):
    with pytest.raises(UsageError, match="valid_until"):
        Policy(valid_until=value)


@pytest.mark.parametrize("value", [float("nan"), 0, "5", True])
def test_timeout_is_a_number_above_zero(value):
    with pytest.raises(UsageError, match="timeout_ms"):
        Policy(timeout_ms=value)


def test_a_log_that_has_a_bug_raises(pair):
    with pytest.raises(ValueError, match="a bug"):
        handed(pair, gate_of(pair, log=raising(ValueError("a bug"))))


def test_a_dangling_link_switches_off(tmp_path):
    on = file_switch(tmp_path / "off")
    assert on()
    (tmp_path / "off").symlink_to(tmp_path / "nowhere")
    assert not on()


@pytest.mark.parametrize(
    "error",
    [ValueError("a bug"), KeyError("a bug"), RuntimeError("a bug"), AssertionError("a bug")],
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
    ungated = (
        pair.bridge()
        .handoff(kvbridge.capture(pair.sender, pair.texts[0]), pair.texts[0], repair=PLAN)
        .decision
    )
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
        ("use_approximate", "use_approximate"),
        ("discard", "use_approximate"),
        ("discard", "discard"),
    ]
    assert [x["reason"] for x in lines] == [d.reason for d in decisions]
    assert lines[0]["tenant"] == "a"
    assert lines[0]["time"] == 5.0
    assert lines[0]["signals"]["length"] > 0
    count = registry.get_sample_value(
        "kvbridge_gate_decisions_total",
        {"tenant": "a", "verdict": "discard", "reason": "gate_refused"},
    )
    assert count == 1
    assert registry.get_sample_value("kvbridge_gate_flops_total") == sum(
        x["gate_flops"] for x in lines
    )


def test_the_file_switch_acts_at_once(pair, tmp_path):
    gate = gate_of(pair, switch=file_switch(tmp_path / "off"))
    assert handed(pair, gate).decision.accepted
    (tmp_path / "off").touch()
    assert_dense(pair, handed(pair, gate), "disabled")


def test_at_least_twenty_faults_are_injected():
    assert len(SETTINGS) + len(SIGNAL_FAULTS) + len(REQUESTS) >= 20
