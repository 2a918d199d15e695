from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from rich.console import Console
from scipy import stats
from statsmodels.stats.multitest import multipletests

from kvbridge.errors import EvalError
from kvbridge.eval.report.summary import summarise
from kvbridge.eval.run.rows import Row
from kvbridge.eval.screen.verdicts import (
    Screened,
    contrast_p,
    correlations,
    fleet_bytes,
    pair_rows,
    screening_summary,
    screening_table,
    size,
)
from kvbridge.eval.statistics.bootstrap import RESOLVED, NotShown

MakeRows = Callable[..., list[Row]]


@pytest.fixture(scope="module")
def fleet(rows_of: MakeRows) -> list[Screened]:
    outcomes = {
        ("a", "b"): {"recovered": {"translated": 0.97}, "correct": {"translated": 0.84}},
        ("b", "a"): {"recovered": {"token_only": 0.76}},
        ("a", "c"): {},
        ("c", "a"): {"recovered": {"sender": 1.1}, "correct": {"sender": 0.8}},
    }
    pairs = [
        Screened(
            s,
            r,
            {"cka": 0.1 * i, "r2": 0.0},
            summarise(rows_of(documents=20, seed=i, **kind)),
            10_000_000 + i,
            190.0,
        )
        for i, ((s, r), kind) in enumerate(outcomes.items())
    ]
    return [*pairs, Screened("b", "c", {"cka": 0.2}, refused="share too few token ends")]


def test_the_best_verdict_comes_first_and_every_verdict_is_there(fleet: list[Screened]) -> None:
    rows = pair_rows(fleet)
    assert [row["verdict"] for row in rows] == [
        "translate",
        "translate behind the gate",
        "cascade instead",
        "prefill",
        None,
    ]
    assert rows[-1]["reason"] == "share too few token ends"
    assert pair_rows(fleet[::-1]) == rows


def test_p_values_are_adjusted_over_the_pairs_that_were_evaluated(fleet: list[Screened]) -> None:
    raw = {(p.sender, p.receiver): contrast_p(p.summary, "sender")[1] for p in fleet if p.summary}
    expected = dict(zip(raw, multipletests(list(raw.values()), method="holm")[1], strict=True))
    for row in pair_rows(fleet):
        wanted = expected.get((row["sender"], row["receiver"]))
        assert row["p_holm"] == (None if wanted is None else pytest.approx(wanted, rel=1e-5))
        assert row["survives"] == (wanted is not None and wanted < 0.05)


def test_p_values_finer_than_the_resamples_are_marked(fleet: list[Screened]) -> None:
    raw = {(p.sender, p.receiver): contrast_p(p.summary, "sender")[1] for p in fleet if p.summary}
    rows = pair_rows(fleet)
    marked = {(r["sender"], r["receiver"]) for r in rows if r["p_extrapolated"]}
    assert marked == {pair for pair, p in raw.items() if p is not None and p < RESOLVED}
    assert 0 < len(marked) < len(rows)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screening_table(screening_summary(fleet)))
    text = console.export_text()
    assert "* p below 0.011" in text
    assert text.count("*") == len(marked) + 1


def test_one_pair_twice_is_refused(fleet: list[Screened]) -> None:
    with pytest.raises(EvalError, match="a → b is given twice"):
        pair_rows([*fleet, fleet[0]])


def test_fleet_bytes_spell_out_the_pairs() -> None:
    sizes = fleet_bytes({("a", "b"): 100, ("b", "a"): 300}, ["a", "b", "c"])
    assert (sizes["pairs"], sizes["measured"], sizes["total_bytes"]) == (6, 2, 1200)
    assert "3 models are P(P − 1) = 3 × 2 = 6 ordered pairs" in sizes["words"]
    assert "4 of them estimated" in sizes["words"]
    assert fleet_bytes({}, ["a", "b"])["total_bytes"] is None
    assert fleet_bytes({}, ["a"])["pairs"] == 0
    with pytest.raises(EvalError, match="named twice"):
        fleet_bytes({}, ["a", "a"])


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (54_300_000, "54.3 MB"),
        (4.1e9, "4.1 GB"),
        (2e12, "2 TB"),
    ],
)
def test_sizes_read_well(count: float, words: str) -> None:
    assert size(count) == words


def test_correlations_are_scipy_s_and_corrected() -> None:
    rng = np.random.default_rng(0)
    outcome = rng.normal(size=14)
    predictors = {
        "good": outcome + 0.3 * rng.normal(size=14),
        "noise": rng.normal(size=14),
        "flat": np.ones(14),
    }
    by_predictor = correlations(predictors, outcome)
    assert isinstance(by_predictor, dict)
    good, noise = by_predictor["good"], by_predictor["noise"]
    assert isinstance(good, dict)
    assert isinstance(noise, dict)
    assert good["spearman"] == pytest.approx(
        stats.spearmanr(predictors["good"], outcome).statistic, rel=1e-5
    )
    assert good["pearson"] == pytest.approx(
        np.corrcoef(predictors["good"], outcome)[0, 1], rel=1e-5
    )
    assert good["pearson_ci"][0] < good["pearson"] < good["pearson_ci"][1]
    raw = [stats.spearmanr(predictors[name], outcome).pvalue for name in ("good", "noise")]
    assert [good["p_holm"], noise["p_holm"]] == pytest.approx(
        multipletests(raw, method="holm")[1], rel=1e-5
    )
    assert isinstance(by_predictor["flat"], NotShown)


def test_nine_pairs_are_too_few_to_speak_of_a_correlation() -> None:
    few = correlations({"x": np.arange(9.0)}, np.arange(9.0))
    assert isinstance(few, NotShown)
    assert "9 pairs, correlations need 10" in few.because
    with_nan = np.r_[np.arange(11.0), np.nan]
    with_nan[:3] = np.nan
    patchy = correlations({"x": with_nan}, np.arange(12.0))
    assert isinstance(patchy, dict)
    assert isinstance(patchy["x"], NotShown)
    with pytest.raises(EvalError, match="3 values for 12 pairs"):
        correlations({"x": [1.0, 2.0, 3.0]}, np.arange(12.0))


def test_the_screening_summary_is_plain_json_and_its_table_fits(fleet: list[Screened]) -> None:
    summary = screening_summary(fleet)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert "correlations need 10" in summary["correlation_with_recovery"]["refused"]
    assert summary["fleet"]["pairs"] == 6
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screening_table(summary))
    text = console.export_text()
    assert "cascade instead" in text
    assert "190 tokens" in text
    assert "P(P − 1)" in text


def test_a_predictor_that_is_zero_is_a_value_and_a_missing_one_is_not(rows_of: MakeRows) -> None:
    summary = summarise(rows_of(documents=12))
    pairs = [
        Screened(f"m{i}", "r", {"x": float(i)} | ({"y": 1.0 * i} if i else {}), summary)
        for i in range(11)
    ]
    recoveries = np.linspace(0.2, 0.8, 11)
    changed = [
        Screened(p.sender, p.receiver, p.predictors, _with_recovery(dict(summary), float(r)))
        for p, r in zip(pairs, recoveries, strict=True)
    ]
    correlated = screening_summary(changed)["correlation_with_recovery"]
    assert correlated["x"]["pairs"] == 11
    assert correlated["y"]["pairs"] == 10
    assert correlated["x"]["spearman"] == pytest.approx(1.0)


def _with_recovery(summary: dict, recovery: float) -> dict:
    conditions = {name: dict(c) for name, c in summary["conditions"].items()}
    conditions["translated"]["recovery"] = recovery
    return summary | {"conditions": conditions}
