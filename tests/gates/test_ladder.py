"""The guarantee of a ladder as it is used: recalibrations from kinds of requests whose risk is
known, decided by Ladder."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import kvbridge
from kvbridge import RepairPlan
from kvbridge.gates.calibrate.config import GateConfig
from kvbridge.gates.calibrate.items import Attempt, GatedItem
from kvbridge.gates.calibrate.levels import Levels, levels_of, report_of
from kvbridge.gates.decide import CalibratedGate, Ladder, Policy
from kvbridge.gates.decide import ladder as ladders
from kvbridge.gates.decide.score import Score
from kvbridge.gates.decide.sealed import Rung
from tests.gates.conftest import made_calibration

PLANS = (RepairPlan(tail=17), RepairPlan(tail=49))
CONFIG = GateConfig(alpha=0.02, lenient_alpha=0.1, delta=0.05, plans=PLANS)
SCORE = Score(("length",), (0.0,), (1.0,), (1.0,), 0.0)


@dataclass(frozen=True)
class Kind:
    """`share` of the requests score `scores` on the rungs and are damaged there with these
    chances."""

    share: float
    scores: tuple[float, float]
    damage: tuple[float, float]


# The second rung's score is right about the first kind and wrong about the others, as a fitted
# score may be.
KINDS = (
    Kind(0.55, (0.5, 0.05), (0.05, 0.001)),
    Kind(0.10, (0.05, 0.5), (0.12, 0.12)),
    Kind(0.25, (0.02, 0.02), (0.008, 0.008)),
    Kind(0.10, (0.5, 0.02), (0.08, 0.40)),
)


def columns(score):
    """What gives this score, less a hair: thresholds are kept to eight digits."""
    score *= 1 - 1e-9
    return {"length": float(np.log(score / (1 - score)))}


def drawn(rng, count):
    """Items, and their scores `[items, 2]`."""
    kinds = [KINDS[k] for k in rng.choice(len(KINDS), count, p=[k.share for k in KINDS])]
    items = [
        GatedItem(
            str(i),
            str(i),
            9,
            tuple(
                Attempt(columns(s), bool(rng.random() < d))
                for s, d in zip(k.scores, k.damage, strict=True)
            ),
        )
        for i, k in enumerate(kinds)
    ]
    return items, np.array([k.scores for k in kinds]) * (1 - 1e-9)


def ladder_of(pair, fitted: Levels, policy: Policy):
    """The real Ladder and the real verdict; only signals are given, not read. Returns kind →
    (verdict, rung)."""
    calibration = made_calibration(
        pair,
        rungs=fitted.rungs,
        stop=fitted.stop,
        strict=fitted.strict,
        lenient=fitted.lenient,
        signals=("length",),
    )
    ladder = Ladder(
        pair.asset,
        sender=pair.sender,
        receiver=pair.receiver,
        calibration=calibration,
        policy=policy,
    )

    def decided(kind):
        tried = []

        def attempt(request, plan, gate):
            number = [r.plan for r in fitted.rungs].index(plan)
            tried.append(number)
            decision = gate._verdict(fitted.rungs[number], columns(kind.scores[number]))
            return replace(request, plan=plan, decision=decision)

        ladder._attempt = attempt
        request, rung = ladder.judged(None, pair.texts[0])
        assert rung == fitted.rungs[tried[-1]]
        return request.decision.verdict, tried[-1]

    return decided


def levels(rng):
    """One recalibration on fresh requests."""
    (learn, learn_scores), (test, test_scores) = drawn(rng, 2000), drawn(rng, 2600)
    stop, strict, lenient = levels_of(learn, learn_scores, test, test_scores, CONFIG)
    return Levels(
        tuple(Rung(p, SCORE, {}) for p in PLANS), ("length",), stop, strict, lenient, None
    )


@pytest.mark.parametrize("policy", [Policy(), Policy(strict_only=True)])
def test_the_risk_of_what_the_ladder_uses_stays_below_alpha(pair, monkeypatch, policy):
    monkeypatch.setattr(ladders, "prefill_flops", lambda *_: 1 << 40)
    rng = np.random.default_rng(0)
    broken = {"use": 0, "accepted": 0}
    held = dict(broken)
    for _ in range(60):
        fitted = levels(rng)
        decided = [(k, *ladder_of(pair, fitted, policy)(k)) for k in KINDS]
        for name, verdicts, alpha in (
            ("use", ("use",), 0.02),
            ("accepted", ("use", "use_approximate"), 0.1),
        ):
            inside = [
                (k.share, k.damage[rung]) for k, verdict, rung in decided if verdict in verdicts
            ]
            if inside:
                held[name] += 1
                broken[name] += sum(s * d for s, d in inside) / sum(s for s, _ in inside) > alpha
    assert min(held.values()) >= 30
    assert max(broken.values()) <= 9, "3 are expected at most; beyond 9 lies less than 0.2 %"


def test_the_report_routes_as_the_ladder_does_and_shows_the_approximate_ones_alone(
    pair, monkeypatch
):
    monkeypatch.setattr(ladders, "prefill_flops", lambda *_: 1 << 40)
    rng = np.random.default_rng(1)
    fitted = levels(rng)
    items, _ = drawn(rng, 3000)
    report = report_of(items, fitted)
    decide = ladder_of(pair, fitted, Policy())
    by_score = {tuple(columns(s)["length"] for s in k.scores): decide(k) for k in KINDS}
    counted = {"use": [0, 0], "use_approximate": [0, 0], "discard": [0, 0]}
    for item in items:
        verdict, rung = by_score[tuple(a.columns["length"] for a in item.attempts)]
        counted[verdict][0] += 1
        counted[verdict][1] += item.attempts[rung].damaged
    shown = {
        name: [report[name]["accepted"], report[name]["damaged"]]
        for name in ("strict", "lenient", "approximate")
    }
    assert shown["strict"] == counted["use"]
    assert shown["approximate"] == counted["use_approximate"]
    assert shown["lenient"] == [
        a + b for a, b in zip(counted["use"], counted["use_approximate"], strict=True)
    ]
    assert counted["use"][0] > 0
    assert counted["use_approximate"][0] > 0


def tails_of(pair, thresholds, **options):
    """A ladder of three tails; a request passes a rung where its tail is in `thresholds`."""
    base = made_calibration(pair)
    rungs = []
    for tail in (11, 21, 31):
        intercept = -5.0 if tail in thresholds else 5.0
        score = replace(base.rungs[0].score, intercept=intercept)
        rungs.append(Rung(RepairPlan(sinks=2, tail=tail), score, {}))
    return Ladder(
        pair.asset,
        sender=pair.sender,
        receiver=pair.receiver,
        calibration=replace(base, rungs=tuple(rungs), stop=0.6),
        **options,
    )


def test_the_ladder_takes_the_first_rung_that_passes_and_pays_for_all(pair, monkeypatch):
    monkeypatch.setattr(ladders, "prefill_flops", lambda *_: 1 << 40)
    text = pair.texts[0]
    snapshot = kvbridge.capture(pair.sender, text)
    costs = []
    for passing in ((11, 21, 31), (21, 31), ()):
        done = tails_of(pair, passing).handoff(snapshot, text)
        costs.append(done.decision.predicted_flops)
        assert done.decision.accepted == bool(passing)
    assert costs[0] < costs[1] < costs[2]


def test_the_ladder_translates_once_and_gives_what_a_bridge_gives(pair, monkeypatch):
    """Three rungs, the last of which passes: bit for bit that plan's own handoff, and every rung's
    cost but the shared parts, which are counted once."""
    monkeypatch.setattr(ladders, "prefill_flops", lambda *_: 1 << 40)
    text = pair.texts[0]
    snapshot = kvbridge.capture(pair.sender, text)
    ladder = tails_of(pair, (31,))
    calls = []
    real = type(pair.asset.translator).__call__
    monkeypatch.setattr(
        type(pair.asset.translator),
        "__call__",
        lambda self, *given, **options: calls.append(self) or real(self, *given, **options),
    )
    handoff, rung = ladder.climb(snapshot, text)
    whole = [c for c in calls if len(c.layers) == len(pair.asset.translator.layers)]
    assert len(whole) == 1, "first_layers' own maps are of one layer"
    assert rung.plan.tail == 31

    alone = []
    for each in ladder.calibration.rungs:
        gate = CalibratedGate(ladder.calibration)
        alone.append(pair.bridge(gate).handoff(snapshot, text, repair=each.plan))
    assert handoff.decision.score == alone[-1].decision.score
    assert handoff.provenance == alone[-1].provenance
    for climbed, plain in zip(handoff.layers, alone[-1].layers, strict=True):
        assert all(torch.equal(climbed[name], plain[name]) for name in plain)
    shared = [pair.evidence(plan=r.plan).parts for r in ladder.calibration.rungs[1:]]
    assert handoff.decision.predicted_flops == sum(h.decision.predicted_flops for h in alone) - sum(
        parts["translate"] + parts["prefill"] for parts in shared
    )


def test_another_number_of_layers_is_computed_and_counted_anew(pair, monkeypatch):
    """Only what a rung takes over from the one before is counted once."""
    monkeypatch.setattr(ladders, "prefill_flops", lambda *_: 1 << 40)
    text = pair.texts[0]
    snapshot = kvbridge.capture(pair.sender, text)
    base = tails_of(pair, (31,)).calibration
    rungs = (base.rungs[0], replace(base.rungs[2], plan=RepairPlan(sinks=2, tail=31, layers=2)))
    calibration = replace(base, rungs=rungs)
    ladder = Ladder(pair.asset, sender=pair.sender, receiver=pair.receiver, calibration=calibration)
    alone = []
    for rung in rungs:
        gate = CalibratedGate(calibration)
        alone.append(pair.bridge(gate).handoff(snapshot, text, repair=rung.plan).decision)
    decision = ladder.handoff(snapshot, text).decision
    assert decision.accepted
    assert decision.predicted_flops == sum(d.predicted_flops for d in alone)


def test_the_ladder_stops_where_a_prefill_is_cheaper(pair, monkeypatch):
    calls = []
    real = Ladder._attempt

    def counted(self, request, plan, gate):
        calls.append(plan.tail)
        return real(self, request, plan, gate)

    monkeypatch.setattr(Ladder, "_attempt", counted)
    text = pair.texts[0]
    tails_of(pair, ()).handoff(kvbridge.capture(pair.sender, text), text)
    assert calls == [11]


def test_the_ladder_does_not_climb_after_another_refusal(pair):
    done = tails_of(pair, (), policy=Policy(enabled=False)).handoff(
        kvbridge.capture(pair.sender, pair.texts[0]), pair.texts[0]
    )
    assert done.decision.reason == "disabled"


def test_tenants_have_their_own_policy(pair):
    ladder = tails_of(
        pair, (11,), policies={"careful": Policy(strict_only=True), "off": Policy(enabled=False)}
    )
    text = pair.texts[0]
    snapshot = kvbridge.capture(pair.sender, text)
    assert ladder.handoff(snapshot, text).decision.accepted
    assert not ladder.handoff(snapshot, text, tenant="careful").decision.accepted
    assert ladder.handoff(snapshot, text, tenant="off").decision.reason == "disabled"
