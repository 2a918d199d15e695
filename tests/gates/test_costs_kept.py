"""What a calibrated ladder believes its rungs cost: the signals it kept, not those it dropped."""

from __future__ import annotations

import math

import pytest

import kvbridge
from kvbridge import Bridge
from kvbridge.gates.calibrate import job as module
from kvbridge.gates.calibrate.config import GateConfig
from kvbridge.gates.calibrate.items import Attempt, GatedItem, scores_of
from kvbridge.gates.calibrate.levels import fit_levels, report_of, whole
from kvbridge.gates.decide import CalibratedGate
from kvbridge.gates.decide.score import Score
from kvbridge.gates.decide.sealed import Rung
from kvbridge.handoff.cost import prefill_flops
from kvbridge.handoff.plan import RepairPlan
from tests.gates.conftest import PLAN, Pair, made_calibration
from tests.gates.test_calibrate import made

PLANS = (RepairPlan(tail=17), RepairPlan(tail=49))
SPENT = {"sender_tail": 300, "next_token": 40, "receiver_head": 7}


def attempt(**more: float) -> Attempt:
    """100 FLOPs of a handoff and 347 of a gate, of which `sender_tail` gives no number for this
    pair."""
    columns = {"length": 0.0, "entropy": 0.0, "unsure": 0.0, "sender_tail": math.nan} | more
    return Attempt(columns, False, 100 + sum(SPENT.values()), SPENT)


def test_only_parts_of_kept_signals_are_paid_for() -> None:
    item = GatedItem("a", "d", 9, (attempt(), attempt(unsure=math.nan)), 1000)
    (kept,) = whole([item], ("length", "next_token"))
    assert [a.flops for a in kept.attempts] == [140, 140], "100 of the handoff and 40 of next_token"
    assert dict(kept.attempts[0].gate_flops) == {"next_token": 40}
    assert kept.attempts[1].columns is None, "a number is missing"
    assert whole([kept], ("length", "next_token")) == [kept]
    (bare,) = whole([item], ("length",))
    assert bare.attempts[0].flops == 100
    (unknown,) = whole(
        [GatedItem("a", "d", 9, (Attempt(attempt().columns, False, 447),), 1000)], ("length",)
    )
    assert unknown.attempts[0].flops == 447, "without parts the sum stands"


def test_a_rung_is_affordable_by_what_the_kept_signals_cost() -> None:
    """Two attempts at 447 each are more than a prefill of 600, at 140 each they are less."""
    rungs = tuple(Rung(plan, Score(("length",), (0.0,), (1.0,), (1.0,), 0.0), {}) for plan in PLANS)
    item = GatedItem("a", "d", 9, (attempt(), attempt()), 600)
    assert math.isinf(scores_of([item], rungs)[0, 1])
    assert scores_of(whole([item], ("length", "next_token")), rungs)[0, 1] == pytest.approx(0.5)


def test_the_reported_share_counts_kept_signals() -> None:
    items = [
        GatedItem(
            i.id,
            i.document,
            i.tokens,
            tuple(
                Attempt({**a.columns, "sender_tail": math.nan}, a.damaged, 447, SPENT)
                for a in i.attempts
            ),
            1000,
        )
        for i in made(400, 3)
    ]
    config = GateConfig(
        alpha=0.1,
        lenient_alpha=0.2,
        delta=0.1,
        signals=("next_token", "length", "sender_tail"),
        plans=(PLAN,),
    )
    levels = fit_levels(items, items, config)
    assert levels.signals == ("next_token", "length")
    assert report_of(whole(items, levels.signals), levels)["cost_share"] == 0.14


def test_a_calibration_predicts_the_flops_that_its_decisions_then_count(pair: Pair) -> None:
    """Signals read for a calibration, one of them dropped; what is left costs what CalibratedGate
    pays at run time."""
    asked, kept = ("sender_tail", "next_token", "length"), ("next_token", "length")
    score = Score(("length",), (0.0,), (1.0,), (1.0,), 0.0)
    calibration = made_calibration(pair, signals=kept, rungs=(Rung(PLAN, score, {}),))
    bridge = Bridge(pair.asset, sender=pair.sender, receiver=pair.receiver)
    samples = [module.Sample("0", "0", pair.texts[0], (len(pair.texts[0]) // 2,))]
    config = GateConfig(label="kl", tau=0.1, signals=asked, plans=(PLAN,))
    items = module.read_items(bridge, samples, calibration.extras, config)
    (item,) = whole(items, kept)
    text = pair.texts[0][: len(pair.texts[0]) // 2]
    gated = Bridge(
        pair.asset, sender=pair.sender, receiver=pair.receiver, gate=CalibratedGate(calibration)
    )
    decision = gated.handoff(kvbridge.capture(pair.sender, text), text, repair=PLAN).decision
    assert item.attempts[0].flops == decision.predicted_flops
    assert item.attempts[0].flops < items[0].attempts[0].flops
    assert item.prefill == prefill_flops(pair.receiver.geometry, item.tokens)
