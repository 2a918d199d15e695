"""Costs by part in FLOPs and milliseconds: what is measured, what a decision then predicts, and
refusals."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict

import pytest
import torch

import kvbridge
from kvbridge import Bridge, RepairPlan, clock
from kvbridge.errors import CorruptFile, DataError, UsageError
from kvbridge.gates.decide import CalibratedGate, Ladder, Policy
from kvbridge.gates.decide import ladder as ladders
from kvbridge.gates.decide.timing import measure
from kvbridge.gates.signals import DEFAULT_SIGNALS, SIGNALS
from kvbridge.gates.signals.extras import Extras
from kvbridge.handoff.cost import Speed, forward_flops, handoff_parts, prefill_flops
from tests.gates.conftest import PLAN, made_calibration
from tests.models import random_texts

SPEED = Speed(prefill=100.0, translate=50.0, repair=20.0, gate=10.0)


def handed(pair, **options):
    gate = CalibratedGate(made_calibration(pair), **options)
    return (
        pair.bridge(gate)
        .handoff(kvbridge.capture(pair.sender, pair.texts[0]), pair.texts[0], repair=PLAN)
        .decision
    )


def test_parts_are_what_was_done(pair):
    evidence = pair.evidence()
    tokens, geometry = len(evidence.ids), pair.receiver.geometry
    covered = int(evidence.alignment.covered.sum())
    assert evidence.parts["translate"] == 2 * pair.asset.translator.parameters * covered
    assert evidence.parts["prefill"] == forward_flops(geometry, tokens, 0, layers=1)
    assert evidence.predicted_flops == sum(evidence.parts.values())
    assert handoff_parts(geometry, tokens, first_layers=len(geometry.layers))[
        "prefill"
    ] < prefill_flops(geometry, tokens)


def test_milliseconds_are_predicted_where_the_speed_is_known(pair):
    assert handed(pair).predicted_ms is None
    decision = handed(pair, speed=SPEED)
    parts = pair.evidence().parts
    gate = decision.predicted_flops - sum(parts.values())
    assert gate > 0
    assert decision.predicted_ms == pytest.approx(
        parts["translate"] / 50 + parts["prefill"] / 100 + parts["repair"] / 20 + gate / 10
    )
    refused = handed(pair, speed=SPEED, policy=Policy(enabled=False))
    assert refused.predicted_ms == pytest.approx(decision.predicted_ms - gate / 10), (
        "what was spent before the refusal"
    )


def test_a_ladder_adds_up_its_attempts_and_shared_work_once(pair, monkeypatch):
    monkeypatch.setattr(ladders, "prefill_flops", lambda *_: 1 << 40)
    made = made_calibration(pair)
    score = type(made.rungs[0].score)(("length",), (0.0,), (1.0,), (0.0,), 9.0)
    rungs = tuple(type(made.rungs[0])(RepairPlan(sinks=2, tail=t), score, {}) for t in (11, 12))
    ladder = Ladder(
        pair.asset,
        sender=pair.sender,
        receiver=pair.receiver,
        calibration=made_calibration(pair, rungs=rungs, stop=0.6),
        speed=SPEED,
    )
    text = pair.texts[0]
    decision = ladder.handoff(kvbridge.capture(pair.sender, text), text).decision
    assert not decision.accepted
    single = [
        CalibratedGate(made_calibration(pair, rungs=(r,)), speed=SPEED).decide(
            pair.evidence(plan=r.plan)
        )
        for r in rungs
    ]
    shared = {
        name: pair.evidence(plan=rungs[1].plan).parts[name] for name in ("prefill", "translate")
    }
    assert decision.predicted_ms == pytest.approx(
        sum(d.predicted_ms for d in single) - SPEED.ms(shared)
    )
    assert decision.predicted_flops == sum(d.predicted_flops for d in single) - sum(shared.values())


def test_speed_round_trips_and_refuses_nonsense():
    assert Speed.from_json(json.loads(json.dumps(SPEED.to_json())), "x") == SPEED
    for body in (
        {},
        [],
        {**asdict(SPEED), "gate": 0},
        {**asdict(SPEED), "gate": True},
        {**asdict(SPEED), "gate": float("nan")},
        {**asdict(SPEED), "paging": 1.0},
    ):
        with pytest.raises(CorruptFile, match="FLOPs per millisecond"):
            Speed.from_json(body, "x")


def test_measured_times_and_speed(pair, monkeypatch):
    """With a clock that ticks once per look, every piece takes as long as another; the first turn's
    ticks are slow."""
    warm = 2 * (4 + len(SIGNALS) + len(DEFAULT_SIGNALS))
    looks = itertools.count()
    monkeypatch.setattr(
        clock.time, "perf_counter", lambda: (n := next(looks)) / 1000 + 5 * min(n, warm)
    )
    text = " ".join(random_texts(8, 260, seed=2))
    timing = measure(pair.bridge(), pair.extras, text, plan=PLAN, tokens=300, repeats=1)
    assert (timing.tokens, timing.repeats, timing.threads) == (300, 1, torch.get_num_threads())
    assert set(timing.signals_ms) == set(SIGNALS)
    assert timing.prefill_ms == pytest.approx(1.0)
    assert timing.gate_ms == pytest.approx(len(SIGNALS))
    assert timing.gate_share == pytest.approx(len(SIGNALS))
    assert timing.default_ms == pytest.approx(len(DEFAULT_SIGNALS)), (
        "read once more without the others"
    )
    assert 0 < timing.default_flops < timing.gate_flops
    assert timing.to_json()["default_share"] == pytest.approx(len(DEFAULT_SIGNALS))
    assert timing.prefill_flops == prefill_flops(pair.receiver.geometry, 300)
    assert timing.speed.prefill == pytest.approx(timing.prefill_flops)
    assert timing.speed.repair == pytest.approx(timing.handoff_parts["repair"])
    assert timing.gate_flops_share == timing.gate_flops / timing.prefill_flops
    assert json.loads(json.dumps(timing.to_json()))["flops_per_ms"] == timing.speed.to_json()


def test_the_default_set_alone_is_read_once(pair, monkeypatch):
    looks = itertools.count()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(looks) / 1000)
    text = " ".join(random_texts(8, 260, seed=2))
    timing = measure(
        pair.bridge(), pair.extras, text, plan=PLAN, tokens=300, repeats=1, signals=DEFAULT_SIGNALS
    )
    assert next(looks) == 2 * 2 * (4 + len(DEFAULT_SIGNALS))
    assert timing.default_ms == timing.gate_ms
    assert timing.default_flops == timing.gate_flops


def test_refusals_say_what_to_do(pair):
    text = " ".join(random_texts(8, 260, seed=2))
    with pytest.raises(UsageError, match="fewer --tokens"):
        measure(pair.bridge(), pair.extras, pair.texts[0], plan=PLAN, tokens=2000)
    with pytest.raises(UsageError, match="positions"):
        measure(pair.bridge(), pair.extras, text * 9, plan=PLAN, tokens=2000)
    with pytest.raises(DataError, match="leverage"):
        measure(pair.bridge(), Extras(), text, plan=PLAN, tokens=200, repeats=1)
    same = Bridge(None, sender=pair.receiver, receiver=pair.receiver)
    with pytest.raises(DataError, match="nothing is translated"):
        measure(same, pair.extras, text, plan=PLAN, tokens=200, repeats=1)


def test_signals_that_cost_nothing_give_a_speed_that_can_be_read_again(pair):
    """No FLOPs in some time are no speed; predicted milliseconds of nothing are nothing at any."""
    text = " ".join(random_texts(8, 260, seed=2))
    speed = measure(
        pair.bridge(), pair.extras, text, plan=PLAN, tokens=300, repeats=1, signals=("length",)
    ).speed
    assert speed.gate == speed.prefill > 0
    assert Speed.from_json(json.loads(json.dumps(speed.to_json())), "x") == speed
