"""Every handoff of a bridge whose gate logs leaves one line, whoever decided."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import kvbridge
from kvbridge import Bridge, Decision, RepairPlan
from kvbridge.errors import UsageError
from kvbridge.gates.decide import CalibratedGate, Ladder, Policy
from kvbridge.gates.decide.audit import Counters, JsonLines, both
from kvbridge.handoff.decision import discard
from kvbridge.model.model import Model
from tests.gates.conftest import PLAN, made_calibration
from tests.gates.test_ladder import tails_of
from tests.gates.test_policy import assert_dense, gate_of, handed, raising


class Full:
    """A ledger without room."""

    def lease(self, asset):
        return None


class Room:
    """A ledger that never says no."""

    def lease(self, asset):
        return nullcontext()


def own(pair, index=0):
    return kvbridge.capture(pair.sender, pair.texts[index])


def translated(pair):
    done = pair.bridge().handoff(own(pair), pair.texts[0], repair=PLAN)
    return replace(done.snapshot(), geometry=pair.sender.geometry)


def nan(pair):
    """NaN in every layer, so that the maps read it and the translation is refused before the
    gate."""
    snapshot = own(pair)
    layers = [{name: t.clone() for name, t in layer.items()} for layer in snapshot.layers]
    for layer in layers:
        layer["v"][20] = float("nan")
    return replace(snapshot, layers=tuple(layers))


# What refuses: (snapshot, text, options of the bridge, reason).
BEFORE = {
    "another text": lambda p: (own(p, 3), p.texts[0], {}, "text_mismatch"),
    "another model": lambda p: (
        kvbridge.capture(p.receiver, p.texts[0]),
        p.texts[0],
        {},
        "wrong_pair",
    ),
    "a translation": lambda p: (translated(p), p.texts[0], {}, "lineage"),
    "a short text": lambda p: (kvbridge.capture(p.sender, "The"), "The", {}, "too_short"),
    "no room": lambda p: (own(p), p.texts[0], {"ledger": Full()}, "no_room"),
    "no translator": lambda p: (own(p), p.texts[0], {"asset": None}, "no_asset"),
    "nan in the cache": lambda p: (nan(p), p.texts[0], {}, "not_finite"),
}


def bridge_of(pair, gate, **options):
    return Bridge(
        **{
            "asset": pair.asset,
            "sender": pair.sender,
            "receiver": pair.receiver,
            "gate": gate,
            **options,
        }
    )


@pytest.fixture
def logged(tmp_path):
    """(log, lines): `lines()` reads what was written so far."""
    path = tmp_path / "log.jsonl"
    return JsonLines(
        path
    ), lambda: [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("policy", [Policy(), Policy(shadow=True), Policy(enabled=False)])
@pytest.mark.parametrize("name", BEFORE)
def test_a_refusal_before_the_gate_is_one_line_and_one_count(pair, logged, name, policy):
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    log, lines = logged
    gate = gate_of(
        pair, log=both(log, Counters(registry)), tenant="a", policy=policy, now=lambda: 5.0
    )
    snapshot, text, options, reason = BEFORE[name](pair)
    done = bridge_of(pair, gate, **options).handoff(snapshot, text, repair=PLAN)
    assert_dense(pair, done, reason)
    (line,) = lines()
    assert (line["verdict"], line["reason"], line["decided"]) == ("discard", reason, "discard")
    assert (line["tenant"], line["time"], line["shadow"]) == ("a", 5.0, policy.shadow)
    assert (line["signals"], line["score"], line["gate_flops"]) == (None, None, 0)
    assert line["tokens"] == len(done.ids)
    assert line["text"] == snapshot.text_digest
    assert line["plan"] == [PLAN.sinks, PLAN.tail, PLAN.layers]
    labels = {"tenant": "a", "verdict": "discard", "reason": reason}
    assert registry.get_sample_value("kvbridge_gate_decisions_total", labels) == 1


def test_a_repair_that_ends_in_nan_is_logged(pair, logged, monkeypatch):
    log, lines = logged

    def broken(receiver, ids, cache, chosen, following=None):
        cache[-1]["v"][0] = float("nan")

    monkeypatch.setattr("kvbridge.engines.transformers.recompute", broken)
    assert_dense(pair, handed(pair, gate_of(pair, log=log)), "not_finite")
    assert [x["reason"] for x in lines()] == ["not_finite"]


def test_both_kinds_of_line_have_the_same_fields(pair, logged):
    log, lines = logged
    gate = gate_of(pair, log=log)
    handed(pair, gate)
    handed(pair, gate, own(pair, 3))
    first, second = lines()
    assert first.keys() == second.keys()
    assert first["signals"] is not None


def test_a_changed_model_is_logged_for_every_request_of_a_batch(pair, logged, monkeypatch):
    log, lines = logged
    monkeypatch.setattr(Model, "changed", lambda self: "dtype")
    bridge_of(pair, gate_of(pair, log=log)).handoff_many(
        [(own(pair, i), pair.texts[i]) for i in (0, 1)], repair=PLAN
    )
    assert [x["reason"] for x in lines()] == ["contract_mismatch"] * 2


@pytest.mark.parametrize(("ledger", "good"), [(Full(), "no_room"), (Room(), "gate_lenient")])
def test_a_batch_leaves_one_line_per_request(pair, logged, ledger, good):
    log, lines = logged
    requests = [
        (own(pair), pair.texts[0]),
        (own(pair, 3), pair.texts[1]),
        (own(pair, 2), pair.texts[2]),
    ]
    done = bridge_of(pair, gate_of(pair, log=log), ledger=ledger).handoff_many(
        requests, repair=PLAN
    )
    reasons = [h.decision.reason for h in done]
    assert reasons == [good, "text_mismatch", good]
    by_text = {x["text"]: x["reason"] for x in lines()}
    assert len(lines()) == 3
    assert [by_text[s.text_digest] for s, _ in requests] == reasons


def test_a_ladder_leaves_one_line_per_attempt(pair, logged):
    log, lines = logged
    ladder = Ladder(
        pair.asset,
        sender=pair.sender,
        receiver=pair.receiver,
        calibration=made_calibration(pair),
        log=log,
    )
    ladder.handoff(own(pair, 3), pair.texts[0], tenant="b")
    ladder.handoff(own(pair), pair.texts[0], tenant="b")
    assert [(x["reason"], x["tenant"]) for x in lines()] == [
        ("text_mismatch", "b"),
        ("gate_lenient", "b"),
    ]


def test_every_rung_that_a_ladder_tries_is_a_line(pair, logged, monkeypatch):
    monkeypatch.setattr("kvbridge.gates.decide.ladder.prefill_flops", lambda *_: 1 << 40)
    log, lines = logged
    tails_of(pair, (31,), log=log).handoff(own(pair), pair.texts[0])
    tails_of(pair, (31,), log=log).handoff(own(pair, 3), pair.texts[0])
    assert [(x["plan"][1], x["reason"]) for x in lines()] == [
        (11, "gate_refused"),
        (21, "gate_refused"),
        (31, "gate_lenient"),
        (11, "text_mismatch"),
    ]


@pytest.mark.parametrize("name", BEFORE)
def test_a_log_on_a_full_disk_leaves_a_refusal_a_refusal(pair, name):
    snapshot, text, options, reason = BEFORE[name](pair)
    gate = gate_of(pair, log=raising(OSError(28, "No space left on device")))
    done = bridge_of(pair, gate, **options).handoff(snapshot, text, repair=PLAN)
    assert_dense(pair, done, "fault")
    assert reason in done.decision.detail


def test_a_log_with_a_bug_raises_before_the_gate_too(pair):
    with pytest.raises(ValueError, match="a bug"):
        handed(pair, gate_of(pair, log=raising(ValueError("a bug"))), own(pair, 3))


EXACT = {
    "plain": ({}, "use", "exact"),
    "shadow": ({"policy": Policy(shadow=True)}, "discard", "disabled"),
    "tenant off": ({"policy": Policy(enabled=False)}, "discard", "disabled"),
    "kill switch": ({"switch": lambda: False}, "discard", "disabled"),
    "kill switch unreadable": (
        {"switch": raising(PermissionError(13, "denied"))},
        "discard",
        "disabled",
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_handoff_is_logged_and_switched_off_like_any_other(pair, logged, name):
    log, lines = logged
    options, verdict, reason = EXACT[name]
    bridge = Bridge(
        None,
        sender=pair.receiver,
        receiver=pair.receiver,
        gate=CalibratedGate(None, log=log, **options),
    )
    done = bridge.handoff(
        kvbridge.capture(pair.receiver, pair.texts[0]), pair.texts[0], repair=PLAN
    )
    assert (done.decision.verdict, done.decision.reason) == (verdict, reason)
    assert (done.layers is None) == (verdict == "discard")
    (line,) = lines()
    assert (line["verdict"], line["decided"]) == (
        verdict,
        "use" if name in ("plain", "shadow") else "discard",
    )


def test_an_exact_handoff_that_cannot_be_logged_is_not_used(pair):
    gate = CalibratedGate(None, log=raising(OSError(28, "full")))
    bridge = Bridge(None, sender=pair.receiver, receiver=pair.receiver, gate=gate)
    done = bridge.handoff(
        kvbridge.capture(pair.receiver, pair.texts[0]), pair.texts[0], repair=PLAN
    )
    assert_dense(pair, done, "fault")


def test_a_gate_that_takes_no_notes_works_as_before(pair):
    class Plain:
        def decide(self, evidence):
            return Decision("use_approximate", "gate_lenient")

    assert handed(pair, Plain(), own(pair, 3)).decision == replace(
        discard("text_mismatch"), detail=handed(pair, None, own(pair, 3)).decision.detail
    )


def test_a_note_cannot_turn_a_refusal_into_a_use(pair):
    class Wrong(CalibratedGate):
        def note(self, decision, snapshot, ids, plan):
            return Decision("use", "exact")

    with pytest.raises(UsageError, match="text_mismatch"):
        handed(pair, Wrong(None), own(pair, 3), plan=RepairPlan(tail=11))
    assert torch.is_grad_enabled()
