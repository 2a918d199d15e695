"""The score, thresholds and parts, on made-up requests whose truth is known; and the whole of it on
a tiny pair."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from kvbridge import Bridge, RepairPlan
from kvbridge.errors import DataError, UsageError
from kvbridge.gates.calibrate import job as module
from kvbridge.gates.calibrate.config import CALIBRATION_SPLITS, GateConfig, split_of
from kvbridge.gates.calibrate.evaluate import auroc, detection, net_saving, table_of
from kvbridge.gates.calibrate.items import Attempt, GatedItem, counts_at, routed, scores_of
from kvbridge.gates.calibrate.job import calibrate, read_signals
from kvbridge.gates.calibrate.levels import fit_levels
from kvbridge.gates.calibrate.passing import Sample, watch
from kvbridge.gates.decide import CalibratedGate
from kvbridge.gates.decide.calibration import load_calibration, save_calibration
from kvbridge.gates.decide.score import fit_score
from tests.gates.conftest import PLAN

CONFIG = GateConfig(
    alpha=0.1, lenient_alpha=0.2, delta=0.1, signals=("next_token", "length"), plans=(PLAN,)
)


def made(count, seed, *, signal=4.0, plans=1, base=-2.0):
    """Requests whose damage depends on `unsure`; `entropy` and `length` are noise."""
    rng = np.random.default_rng(seed)
    items = []
    for i in range(count):
        attempts = []
        unsure = rng.normal()
        for plan in range(plans):
            chance = 1 / (1 + math.exp(-(signal * unsure + base - plan)))
            columns = {"entropy": rng.normal(), "unsure": unsure, "length": rng.normal()}
            attempts.append(Attempt(columns, bool(rng.random() < chance), 10 * (plan + 1)))
        items.append(GatedItem(f"{seed}/{i}", f"d{i % 50}", 100, tuple(attempts), 1000))
    return items


def test_a_level_holds_and_covers_where_the_signal_is_good():
    levels = fit_levels(made(800, 0), made(800, 1), CONFIG)
    assert levels.strict is not None
    assert levels.lenient is not None
    assert levels.strict.threshold <= levels.lenient.threshold
    fresh = made(20_000, 2)
    score, damaged = routed(fresh, scores_of(fresh, levels.rungs), levels.stop)
    accepted = score <= levels.strict.threshold
    assert levels.stop == 1.0
    assert accepted.mean() > 0.4
    assert damaged[accepted].mean() <= 0.1


def test_without_a_signal_nothing_holds():
    assert (
        fit_levels(
            made(800, 0, signal=0.0, base=0.0), made(800, 1, signal=0.0, base=0.0), CONFIG
        ).strict
        is None
    )


def test_the_guarantee_over_recalibrations():
    fresh = made(20_000, 3, signal=2.0)
    violations = given = 0
    for seed in range(30):
        levels = fit_levels(
            made(250, 100 + seed, signal=2.0), made(250, 500 + seed, signal=2.0), CONFIG
        )
        if levels.strict is not None:
            score, damaged = routed(fresh, scores_of(fresh, levels.rungs), levels.stop)
            given += 1
            violations += damaged[score <= levels.strict.threshold].mean() > 0.1
    assert given > 10
    assert violations <= 8, "3 are expected at most; beyond 8 lies less than 0.1 %"


def test_a_request_ends_on_the_first_rung_at_or_below_the_stop():
    items = made(3, 0, plans=2)
    scores = np.array([[0.1, 0.0], [0.5, 0.2], [0.9, np.inf]])
    score, damaged = routed(items, scores, 0.3)
    assert score.tolist() == [0.1, 0.2, np.inf]
    assert damaged.tolist() == [items[0].attempts[0].damaged, items[1].attempts[1].damaged, False]
    assert [n for _, n, _ in counts_at(score, damaged, [0.0, 0.1, 0.3])] == [0, 1, 2]
    assert routed(items, scores, 0.6)[0].tolist() == [0.1, 0.5, np.inf], (
        "a better rung further up is not looked at"
    )
    config = GateConfig(
        alpha=0.1,
        delta=0.1,
        lenient_alpha=0.2,
        signals=CONFIG.signals,
        plans=(PLAN, RepairPlan(tail=30)),
    )
    levels = fit_levels(made(600, 0, plans=2), made(600, 1, plans=2), config)
    assert len(levels.rungs) == 2
    assert levels.conformal is None
    assert levels.strict is not None
    assert levels.strict.threshold <= levels.stop < 1


def test_a_rung_that_costs_more_than_a_prefill_is_not_tried():
    levels = fit_levels(
        made(600, 0, plans=2),
        made(600, 1, plans=2),
        GateConfig(
            alpha=0.1,
            delta=0.1,
            lenient_alpha=0.2,
            signals=CONFIG.signals,
            plans=(PLAN, RepairPlan(tail=30)),
        ),
    )
    dear = [
        GatedItem(
            i.id,
            i.document,
            i.tokens,
            tuple(Attempt(a.columns, a.damaged, 600) for a in i.attempts),
            1000,
        )
        for i in made(20, 7, plans=2)
    ]
    assert np.isinf(scores_of(dear, levels.rungs)[:, 1]).all()


def test_the_ladder_ends_where_an_attempt_ended_before_the_gate():
    config = GateConfig(
        alpha=0.1,
        delta=0.1,
        lenient_alpha=0.2,
        signals=CONFIG.signals,
        plans=(PLAN, RepairPlan(tail=30)),
    )
    levels = fit_levels(made(600, 0, plans=2), made(600, 1, plans=2), config)
    refused = [
        GatedItem(i.id, i.document, 9, (Attempt(None, False), i.attempts[1]), 1000)
        for i in made(20, 7, plans=2)
    ]
    assert np.isinf(scores_of(refused, levels.rungs)).all()


def test_limits_refuse_what_no_right_cache_showed():
    config = GateConfig(
        alpha=0.1,
        lenient_alpha=0.2,
        delta=0.1,
        signals=("next_token", "sender_tail"),
        plans=(PLAN,),
    )

    def put(items, value):
        return [
            GatedItem(
                i.id,
                i.document,
                9,
                (
                    Attempt(
                        {**i.attempts[0].columns, "sender_tail": value(n)}, i.attempts[0].damaged
                    ),
                ),
            )
            for n, i in enumerate(items)
        ]

    levels = fit_levels(
        put(made(400, 0), lambda n: -5 + n / 1000), put(made(400, 1), lambda n: -5.0), config
    )
    assert set(levels.rungs[0].limits) == {"sender_tail"}
    assert np.isinf(scores_of(put(made(50, 3), lambda n: -1.0), levels.rungs)).all()
    assert np.isfinite(scores_of(put(made(50, 3), lambda n: -5.0), levels.rungs)).all()


def test_a_number_that_is_missing_counts_as_refused():
    items = made(400, 0)
    holed = [
        GatedItem(
            i.id,
            i.document,
            9,
            (
                Attempt(
                    {**i.attempts[0].columns, "length": math.nan if n < 2 else 0.1 * n},
                    i.attempts[0].damaged,
                ),
            ),
        )
        for n, i in enumerate(items)
    ]
    levels = fit_levels(holed, made(400, 1), CONFIG)
    assert "length" in levels.signals
    mostly = [
        GatedItem(
            i.id,
            i.document,
            9,
            (Attempt({**i.attempts[0].columns, "length": math.nan}, i.attempts[0].damaged),),
        )
        for i in items
    ]
    assert fit_levels(mostly, made(400, 1), CONFIG).signals == ("next_token",)


def test_score_refuses_one_class_and_few_documents():
    with pytest.raises(DataError, match="damaged"):
        fit_score(("a",), [[0.0]] * 20, [False] * 20, [str(i) for i in range(20)])
    with pytest.raises(DataError):
        fit_score(
            ("a",), [[float(i)] for i in range(20)], [i % 2 == 0 for i in range(20)], ["one"] * 20
        )


def test_score_is_sklearns_probability():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3))
    y = rng.random(300) < 1 / (1 + np.exp(-2 * x[:, 0]))
    score, left_out = fit_score(("a", "b", "c"), x, y, [str(i) for i in range(300)])
    assert 0.7 < roc_auc_score(y, left_out) <= roc_auc_score(y, score.of(x)) + 0.01
    assert roc_auc_score(y, score.of(x)) > 0.75
    assert score({"a": 1e9, "b": 0.0, "c": 0.0}) == score({"a": 1e12, "b": 0.0, "c": 0.0}), (
        "cut off"
    )


def test_figures_against_sklearn():
    rng = np.random.default_rng(0)
    y, s = rng.random(200) < 0.3, np.round(rng.random(200), 1)
    assert auroc(s, y) == pytest.approx(roc_auc_score(y, s))
    assert auroc(s, np.zeros(200)) is None
    assert detection(np.arange(100), np.array([97.5, 98.5, 200]), 0.01) == pytest.approx(2 / 3)
    assert net_saving(0.5, prefill=10, handoff=2, gate=1) == pytest.approx(0.5 * 7 - 0.5 * 3)
    assert table_of({"a": s, "b": np.full(200, np.nan)}, y).keys() == {"a"}


@pytest.mark.parametrize(
    "change",
    [
        {"label": "x"},
        {"alpha": 0.0},
        {"delta": 1.0},
        {"alpha": 0.3},
        {"tau": float("nan")},
        {"tau": -1.0},
        {"signals": ("x",)},
        {"signals": ()},
        {"plans": ()},
        {"plans": (PLAN, PLAN)},
        {"signals": ("length", "length")},
        {"plans": (RepairPlan(tail=49), RepairPlan(tail=17))},
        {"plans": tuple(RepairPlan(tail=t) for t in range(1, 18))},
    ],
)
def test_configurations_that_mean_nothing(change):
    with pytest.raises(UsageError):
        GateConfig(**change)


def test_parts_follow_the_document():
    names = [f"doc-{i}" for i in range(4000)]
    shares = {p: sum(split_of(n) == p for n in names) / len(names) for p in CALIBRATION_SPLITS}
    assert all(abs(shares[p] - CALIBRATION_SPLITS[p]) < 0.03 for p in CALIBRATION_SPLITS)


def test_end_to_end_on_a_tiny_pair(pair, tmp_path, monkeypatch):
    """Calibrated, saved, loaded; the gate then decides as the calibration's own arithmetic says."""
    monkeypatch.setattr(
        module, "split_of", lambda d: ("statistics", "score", "thresholds", "report")[int(d) % 4]
    )
    samples = [
        Sample(str(i), str(i), t, tuple(range(80, 240, 11))) for i, t in enumerate(pair.texts)
    ]
    middle = float(np.median([s.outcome.kl for s in watch(pair.bridge(), samples, PLAN)]))
    config = GateConfig(
        label="kl", tau=middle, alpha=0.3, lenient_alpha=0.9, delta=0.3, plans=(PLAN,)
    )
    calibration = calibrate(pair.bridge(), samples, config)
    save_calibration(calibration, tmp_path / "g")
    loaded = load_calibration(tmp_path / "g", pair.asset)
    assert loaded.report["items"] > 0
    assert loaded.needed >= 1
    evidence = pair.evidence(text=pair.texts[3])
    decision = CalibratedGate(loaded).decide(evidence)
    columns, _ = read_signals(evidence, loaded.extras)
    if decision.score not in (None, 1.0):
        assert decision.score == pytest.approx(loaded.rungs[0].score(columns))
    assert decision.calibration == loaded.digest
    with pytest.raises(UsageError, match="asset"):
        calibrate(
            type(pair.bridge())(pair.asset.translator, sender=pair.sender, receiver=pair.receiver),
            samples,
            config,
        )
    monkeypatch.setattr(
        module,
        "split_of",
        lambda d: ("statistics", "score", "thresholds", "report")[min(int(d), 3)],
    )
    few = [Sample(str(i), str(i), t, (80,)) for i, t in enumerate(pair.texts[:4])]
    with pytest.raises(
        DataError, match=r"128 sampled tokens.*--data.*--limit.* 4 accepted requests"
    ):
        calibrate(pair.bridge(), few, config)
    with pytest.raises(DataError, match=r"every part.*--data.*--limit"):
        calibrate(pair.bridge(), samples[:1], config)


def test_statistics_that_overflow_are_refused_before_anything_is_written(pair):
    """An asset whose factor is finite but whose projections are not: a calibration of it could not
    be loaded again."""
    odd = {
        n: replace(f, directions=torch.full_like(f.directions, 3e38))
        for n, f in pair.asset.factors.items()
    }
    bridge = Bridge(replace(pair.asset, factors=odd), sender=pair.sender, receiver=pair.receiver)
    samples = [Sample(str(i), str(i), t, (len(t) - 40,)) for i, t in enumerate(pair.texts[:6])]
    with pytest.raises(
        DataError, match="NaN or infinity in sender rows in the asset's leverage factors"
    ):
        module.gather(bridge, samples, PLAN)


def test_no_signal_at_all_names_those_that_were_asked_for():
    items = [
        GatedItem(
            i.id,
            i.document,
            9,
            (
                Attempt(
                    {"leverage": math.nan, "outside": math.nan, "corpus_distance": math.nan}, False
                ),
            ),
        )
        for i in made(40, 0)
    ]
    with pytest.raises(
        DataError, match=r"of the signals leverage none gave a number.*fit it again"
    ):
        fit_levels(items, items, replace(CONFIG, signals=("leverage",)))
