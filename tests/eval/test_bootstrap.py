from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from benchmarks import coverage
from benchmarks.coverage import Scenario, simulate
from kvbridge.errors import EvalError
from kvbridge.eval.statistics.bootstrap import METHODS, RESOLVED, ratio_interval, resampled
from kvbridge.eval.statistics.outcomes import holm

RNG = np.random.default_rng(3)


def data(
    documents: int = 40, per_document: int = 5, seed: int = 1
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    rng = np.random.default_rng(seed)
    clusters = [f"d{index}" for index in range(documents) for _ in range(per_document)]
    shift = np.repeat(rng.normal(0, 0.5, documents), per_document)
    denominator = rng.uniform(1, 3, documents * per_document)
    return (
        denominator * (0.7 + 0.1 * shift) + rng.normal(0, 0.3, len(denominator)),
        denominator,
        clusters,
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_deterministic_by_seed_and_holds_its_estimate(method: str) -> None:
    n, d, clusters = data()
    first = ratio_interval(n, d, clusters, method=method, seed=4)
    assert first == ratio_interval(n, d, clusters, method=method, seed=4)
    assert first != ratio_interval(n, d, clusters, method=method, seed=5)
    assert first.low < first.estimate < first.high
    assert first.estimate == pytest.approx(n.sum() / d.sum(), rel=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_shuffled_rows_change_no_bit(method: str) -> None:
    n, d, clusters = data()
    order = RNG.permutation(len(n))
    shuffled = ratio_interval(n[order], d[order], [clusters[i] for i in order], method=method)
    assert shuffled == ratio_interval(n, d, clusters, method=method)


@pytest.mark.parametrize("method", ["percentile", "BCa"])
def test_percentile_and_bca_agree_with_scipy_where_scipy_applies(method: str) -> None:
    """One item a document and denominators of 1: the mean, which scipy.stats.bootstrap resamples as
    we do."""
    values = np.random.default_rng(2).gamma(2.0, size=60)
    clusters = [f"{index}" for index in range(60)]
    interval = ratio_interval(
        values, np.ones(60), clusters, method=method.lower(), repetitions=40_000
    )
    oracle = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=40_000,
        method=method,
        vectorized=True,
        rng=np.random.default_rng(0),
    ).confidence_interval
    width = oracle.high - oracle.low
    assert interval.low == pytest.approx(oracle.low, abs=0.03 * width)
    assert interval.high == pytest.approx(oracle.high, abs=0.03 * width)


def test_studentised_is_students_interval_for_many_normal_documents() -> None:
    values = np.random.default_rng(2).normal(5, 2, 400)
    interval = ratio_interval(
        values, np.ones(400), [f"{i}" for i in range(400)], repetitions=20_000
    )
    low, high = stats.t.interval(0.95, 399, values.mean(), stats.sem(values))
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.05 * (high - low))


def test_correlated_items_widen_the_interval() -> None:
    rng = np.random.default_rng(0)
    values = np.repeat(rng.normal(size=40), 10)
    clustered = ratio_interval(values, np.ones(400), [f"{i // 10}" for i in range(400)])
    alone = ratio_interval(values, np.ones(400), [f"{i}" for i in range(400)])
    assert clustered.high - clustered.low > 2.5 * (alone.high - alone.low)


def test_p_matches_the_interval_and_a_t_test() -> None:
    rng = np.random.default_rng(5)
    for shift in (0.0, 0.1, 0.2, 0.3, 0.5):
        values = rng.normal(shift, 1, 100)
        interval = ratio_interval(values, np.ones(100), [f"{i}" for i in range(100)])
        assert (interval.p < 0.05) == (not interval.contains(0))
        assert interval.p == pytest.approx(stats.ttest_1samp(values, 0).pvalue, abs=0.03)


def test_a_negative_denominator_only_flips_signs() -> None:
    n, d, clusters = data()
    plain, flipped = ratio_interval(n, d, clusters), ratio_interval(-n, -d, clusters)
    assert (plain.estimate, plain.low, plain.high) == pytest.approx(
        (flipped.estimate, flipped.low, flipped.high)
    )


def test_a_denominator_that_may_be_zero_has_no_bounds() -> None:
    n, _, clusters = data()
    interval = ratio_interval(n, np.random.default_rng(0).normal(0.01, 1, len(n)), clusters)
    assert not interval.known
    assert not interval.contains(interval.estimate)


def test_few_events_keep_a_bounded_interval() -> None:
    """Two misses in 120: replicates without any must not blow the interval up (exact: 0.2 % to 5.9
    %)."""
    values = np.zeros(120)
    values[[7, 60]] = 1
    sizes = [f"{int(i**1.2) // 9}" for i in range(120)]
    interval = ratio_interval(values, np.ones(120), sizes)
    assert -0.01 < interval.low < interval.estimate < interval.high < 0.09


def test_resampling_in_chunks_draws_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = np.random.default_rng(0).normal(size=(30, 2))
    whole = resampled(columns, 500, 7)
    monkeypatch.setattr("kvbridge.eval.statistics.bootstrap._CACHED_WEIGHTS", 1000)
    np.testing.assert_allclose(resampled(columns, 500, 7), whole, rtol=1e-12)


@settings(max_examples=50, deadline=None)
@given(scale=st.floats(0.01, 100), seed=st.integers(0, 50))
def test_the_interval_scales_with_its_numerator(scale: float, seed: int) -> None:
    n, d, clusters = data(seed=seed)
    plain, scaled = ratio_interval(n, d, clusters), ratio_interval(n * scale, d, clusters)
    assert (scaled.low, scaled.high) == pytest.approx(
        (plain.low * scale, plain.high * scale), rel=1e-6
    )


def test_one_document_has_an_estimate_and_no_interval() -> None:
    interval = ratio_interval([1.0, 0.0, 1.0], [1.0, 1.0, 1.0], ["d", "d", "d"])
    assert interval.estimate == pytest.approx(2 / 3)
    assert not interval.known


def test_documents_that_all_agree_give_a_point() -> None:
    interval = ratio_interval(np.ones(6), np.ones(6), list("aabbcc"))
    assert (interval.estimate, interval.low, interval.high) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("n", "d", "clusters", "words"),
    [
        ([], [], [], "no items"),
        ([1.0], [1.0], ["a", "b"], "one cluster label per item"),
        ([1.0, np.nan], [1.0, 1.0], ["a", "b"], "NaN or infinity"),
        ([1.0, 1.0], [1.0, np.inf], ["a", "b"], "NaN or infinity"),
    ],
)
def test_bad_input_is_refused(n: list, d: list, clusters: list, words: str) -> None:
    with pytest.raises(EvalError, match=words):
        ratio_interval(n, d, clusters)


def test_the_coverage_command_prints_every_scenario(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["coverage", "--repetitions", "2", "--documents", "20", "--json"]
    )
    with pytest.raises(SystemExit):
        coverage.main()
    body = json.loads(capsys.readouterr().out)
    assert len(body) == len(list(coverage.scenarios()))
    assert {"statistic", "sizes", "p", "documents", "studentised"} <= body[0].keys()
    assert all(0 <= case["studentised"] <= 1 for case in body)


@pytest.mark.parametrize("statistic", ["accuracy", "paired difference", "recovery"])
@pytest.mark.parametrize("sizes", ["equal", "unequal"])
def test_simulated_coverage_in_its_quick_form(statistic: str, sizes: str) -> None:
    """300 repetitions, ±3 standard errors are ±3.8 points; `benchmarks.coverage` is the full
    form."""
    held = simulate(Scenario(statistic, 50, sizes, 0.3), 300, methods=("studentised",))[
        "studentised"
    ]
    assert 0.912 <= held <= 0.99


def test_p_has_no_floor_and_holm_over_many_pairs_can_pass() -> None:
    """56 pairs of 8 models: 2,000 resamples alone cannot give a p below 0.001, and 56 of these are
    above 0.05."""
    rng = np.random.default_rng(0)
    p_values = []
    for _ in range(56):
        values = rng.normal(1.2, 1, 60)
        p = ratio_interval(values, np.ones(60), [f"{i}" for i in range(60)]).p
        exact = stats.ttest_1samp(values, 0).pvalue
        assert exact < p < RESOLVED, (
            "beyond the resamples the tail says less than Student's, never more"
        )
        p_values.append(p)
    assert (holm(p_values) < 0.05).all()


def test_p_falls_as_the_effect_grows_across_the_resolution() -> None:
    values = np.random.default_rng(1).normal(0, 1, 80)
    p = [
        ratio_interval(values + s, np.ones(80), [f"{i}" for i in range(80)]).p
        for s in np.linspace(0.2, 1.5, 40)
    ]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(p))
    assert p[0] > RESOLVED > p[-1]
    mirrored = ratio_interval(-values - 1.0, np.ones(80), [f"{i}" for i in range(80)]).p
    assert 0 < mirrored < RESOLVED


def test_small_p_values_are_rare_without_an_effect() -> None:
    """Skewed documents, 1,500 samples: p < 0.005 at most 0.9 % of the time (three standard errors
    above 0.5 % is 1.05 %)."""
    rng = np.random.default_rng(2)
    names = [f"{i}" for i in range(40)]
    p = [ratio_interval(rng.exponential(size=40) - 1, np.ones(40), names).p for _ in range(1500)]
    assert np.mean(np.array(p) < 0.005) <= 0.0105
    assert np.mean(np.array(p) < 0.0005) <= 0.0022
