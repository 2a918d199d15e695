from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from kvbridge.errors import EvalError
from kvbridge.eval.statistics.bootstrap import Interval, NotShown
from kvbridge.eval.statistics.means import difference, mean, proportion, wilson
from kvbridge.eval.statistics.outcomes import (
    holm,
    identity,
    items_for_half_width,
    mcnemar_exact,
)
from kvbridge.eval.statistics.ratios import floor_normalised, gap_recovered, recovery, retention

answers = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 5)), min_size=1, max_size=60
)


def known(figure: Interval | NotShown) -> Interval:
    assert isinstance(figure, Interval), figure
    return figure


def columns(outcomes: list[tuple[int, int, int]]) -> tuple[list[int], list[int], list[str]]:
    t, s, d = zip(*outcomes, strict=True)
    return list(t), list(s), [f"d{x}" for x in d]


def binary(p: float, n: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).random(n) < p).astype(float)


CLUSTERS = [f"d{i // 4}" for i in range(200)]


@settings(max_examples=100, deadline=None)
@given(answers)
def test_the_identity_holds_exactly(outcomes: list[tuple[int, int, int]]) -> None:
    t, s, documents = columns(outcomes)
    parts = identity(t, s, documents)
    n, wrong = len(t), sum(1 - x for x in s)
    assert parts.sender_wrong == wrong
    difference = Fraction(sum(t), n) - Fraction(sum(s), n)
    assert difference == Fraction(parts.gained, n) - Fraction(parts.harmed, n)
    gain = Fraction(wrong, n) * (Fraction(parts.gained, wrong) if wrong else 0)
    harm = Fraction(n - wrong, n) * (Fraction(parts.harmed, n - wrong) if wrong < n else 0)
    assert difference == gain - harm
    assert parts.difference.estimate == pytest.approx(float(difference), abs=1e-15)
    assert (parts.gain.estimate, parts.harm.estimate) == pytest.approx(
        (float(gain), float(harm)), abs=1e-15
    )


@settings(max_examples=50, deadline=None)
@given(answers, st.randoms(use_true_random=False))
def test_permuting_items_changes_nothing(outcomes: list[tuple[int, int, int]], random) -> None:
    shuffled = list(outcomes)
    random.shuffle(shuffled)
    assert repr(identity(*columns(outcomes))) == repr(identity(*columns(shuffled)))


def test_identity_without_a_wrong_or_a_right_sender() -> None:
    parts = identity([1, 0], [1, 1], ["a", "b"])
    assert isinstance(parts.gain_given_wrong, NotShown)
    assert "wrong" in parts.gain_given_wrong.because
    parts = identity([1, 0], [0, 0], ["a", "b"])
    assert isinstance(parts.harm_given_right, NotShown)
    assert "right" in parts.harm_given_right.because


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_that_of_statsmodels(b: int, c: int, both: int) -> None:
    first = [1] * b + [0] * c + [1] * both + [0]
    second = [0] * b + [1] * c + [1] * both + [0]
    test = mcnemar_exact(first, second)
    assert (test.only_first, test.only_second) == (b, c)
    if b + c:
        assert test.p == pytest.approx(
            float(mcnemar([[both, b], [c, 1]], exact=True).pvalue), rel=1e-9
        )
    else:
        assert test.p == 1.0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 500), st.floats(0, 1))
def test_wilson_is_that_of_statsmodels_and_scipy(trials: int, share: float) -> None:
    successes = round(trials * share)
    interval = wilson(successes, trials)
    assert interval == pytest.approx(
        proportion_confint(successes, trials, method="wilson"), abs=1e-12
    )
    oracle = stats.binomtest(successes, trials).proportion_ci(method="wilson")
    assert interval == pytest.approx((oracle.low, oracle.high), abs=1e-12)


@pytest.mark.parametrize("count", [1, 2, 5, 30])
def test_holm_is_that_of_statsmodels(count: int) -> None:
    """Few calls: multipletests collects garbage each time, which takes longer than everything else
    here."""
    p = np.random.default_rng(count).beta(0.3, 2, count).round(3)
    np.testing.assert_allclose(holm(p), multipletests(p, method="holm")[1], atol=1e-15)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_holm_rejects_what_stepping_down_by_hand_rejects(p: list[float]) -> None:
    adjusted = holm(p)
    for level in (0.01, 0.05, 0.3):
        rejected = set()
        for step, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
            if p[index] * (len(p) - step) > level:
                break
            rejected.add(index)
        assert {i for i in range(len(p)) if adjusted[i] <= level} == rejected


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 30), st.integers(1, 5), st.integers(0, 1000))
def test_recovery_of_native_is_one_and_of_no_context_zero(
    documents: int, per_document: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    n = documents * per_document
    native, floor = rng.uniform(50, 90, n), rng.uniform(100, 180, n)
    clusters = [f"d{i % documents}" for i in range(n)]
    top, bottom = (
        recovery(native, native, floor, clusters),
        recovery(floor, native, floor, clusters),
    )
    assert isinstance(top, Interval)
    assert isinstance(bottom, Interval)
    assert (top.estimate, top.low, top.high) == (1.0, 1.0, 1.0)
    assert (bottom.estimate, bottom.low, bottom.high) == (0.0, 0.0, 0.0)


def test_recovery_is_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    figure = known(recovery([60.0, 11.0], [50.0, 10.0], [100.0, 12.0], ["a", "b"]))
    assert figure.estimate == pytest.approx((40 + 1) / (50 + 2))


def test_recovery_is_refused_where_context_does_not_help() -> None:
    rng = np.random.default_rng(0)
    native, floor = rng.normal(100, 10, 200), rng.normal(100, 10, 200)
    figure = recovery(native, native, floor, CLUSTERS)
    assert isinstance(figure, NotShown)
    assert "context does not help" in figure.because
    assert isinstance(recovery([5.0, 4.0], [9.0, 9.0], [4.0, 3.0], ["a", "b"]), NotShown)
    worse = recovery([5.0, 4.0], [9.0, 9.0], [4.0, 3.0], ["a", "b"])
    assert isinstance(worse, NotShown)


def test_retention_and_its_floor() -> None:
    d, t = np.ones(200), binary(0.8, 200, 1)
    assert known(retention(t, d, CLUSTERS)).estimate == pytest.approx(t.mean())
    floored = known(floor_normalised(t, d, np.full(200, 0.25), CLUSTERS))
    assert floored.estimate == pytest.approx((t.mean() - 0.25) / 0.75)
    none = retention(t, np.zeros(200), CLUSTERS)
    assert isinstance(none, NotShown)
    assert "scores 0" in none.because


def test_floor_normalised_is_refused_for_a_receiver_at_chance() -> None:
    figure = floor_normalised(
        binary(0.25, 200, 1), binary(0.25, 200, 2), np.full(200, 0.25), CLUSTERS
    )
    assert isinstance(figure, NotShown)
    assert "not above chance" in figure.because


def test_share_of_the_gap() -> None:
    s, d = binary(0.3, 200, 1), np.maximum(binary(0.3, 200, 1), binary(0.8, 200, 2))
    g = np.where(np.arange(200) % 2 == 0, d, s)
    figure = gap_recovered(s, d, g, CLUSTERS)
    assert isinstance(figure, Interval)
    assert figure.estimate == pytest.approx((g.sum() - s.sum()) / (d.sum() - s.sum()))
    whole = known(gap_recovered(s, d, d, CLUSTERS))
    assert (whole.estimate, whole.known) == (1.0, False)


def test_the_share_of_a_gap_that_may_not_exist_is_refused_with_the_interval() -> None:
    s = binary(0.6, 200, 1)
    d = binary(0.62, 200, 2)
    figure = gap_recovered(s, d, d, CLUSTERS)
    assert isinstance(figure, NotShown)
    assert "contains 0" in figure.because
    assert "[" in figure.because
    below = gap_recovered(np.ones(200), binary(0.5, 200, 3), s, CLUSTERS)
    assert isinstance(below, NotShown)
    assert "no gap to recover" in below.because
    alone = gap_recovered([0.0], [1.0], [1.0], ["d"])
    assert isinstance(alone, NotShown)
    assert "too few documents" in alone.because


def test_a_share_stays_in_its_range_and_falls_back_to_wilson() -> None:
    values = np.ones(200)
    figure = proportion(values, CLUSTERS)
    assert (figure.low, figure.high) == wilson(50, 50)
    nearly = values.copy()
    nearly[[0, 40, 90]] = 0
    figure = proportion(nearly, CLUSTERS)
    assert 0.9 < figure.low < figure.estimate < figure.high <= 1.0


def test_a_share_whose_interval_would_pass_one_is_cut() -> None:
    values, clusters = np.ones(60), [f"d{i // 3}" for i in range(60)]
    values[0] = 0
    assert mean(values, clusters).high > 1
    assert proportion(values, clusters).high == 1.0
    conditional = identity(values, np.zeros(60), clusters).gain_given_wrong
    assert known(conditional).high == 1.0


def test_the_difference_is_that_of_the_means() -> None:
    a, b = binary(0.7, 200, 1), binary(0.5, 200, 2)
    figure = difference(a, b, CLUSTERS)
    assert figure.estimate == pytest.approx(a.mean() - b.mean())
    mirrored = difference(b, a, CLUSTERS)
    assert (mirrored.low, mirrored.high) == pytest.approx((-figure.high, -figure.low), abs=0.01)


def test_items_needed_for_two_points() -> None:
    assert items_for_half_width(Interval(0.1, 0.06, 0.14), 500) == 2000
    assert items_for_half_width(Interval(0.1, math.nan, math.nan), 500) is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: identity([0, 2], [0, 1], ["a", "b"]), "t must hold 0 or 1"),
        (lambda: identity([0, math.nan], [0, 1], ["a", "b"]), "t must hold 0 or 1"),
        (lambda: mcnemar_exact([0, 1], [0, -1]), "second must hold 0 or 1"),
        (lambda: proportion([1.5, 0], ["a", "b"]), r"must lie in \[0, 1\]"),
        (lambda: mean([], []), "no items"),
        (lambda: wilson(5, 0), "trials > 0"),
        (lambda: wilson(6, 5), "successes ≤ trials"),
        (lambda: holm([0.1, math.nan]), "p-values must lie"),
    ],
)
def test_bad_input_is_refused(call, words: str) -> None:
    with pytest.raises(EvalError, match=words):
        call()


@pytest.mark.parametrize("documents", [2, 4, 5, 6, 10, 40])
def test_differences_without_spread_get_the_bound_of_the_sign_test(documents: int) -> None:
    names = [f"d{i // 3}" for i in range(3 * documents)]
    ones, zeros = np.ones(3 * documents), np.zeros(3 * documents)
    won, lost, equal = (
        difference(a, b, names) for a, b in ((ones, zeros), (zeros, ones), (ones, ones))
    )
    assert won.p == lost.p == stats.binomtest(documents, documents).pvalue
    assert (won.low > 0) == (won.p < 0.05)
    assert (won.low, won.high) == pytest.approx((-lost.high, -lost.low))
    exact = stats.binomtest(documents, documents).proportion_ci(method="exact")
    assert (won.low, won.high) == pytest.approx((2 * exact.low - 1, 1.0))
    assert equal.p == 1.0
    assert -equal.low == equal.high == pytest.approx(1 - exact.low)
    assert all(items_for_half_width(figure, 3 * documents) is None for figure in (won, lost, equal))


def test_losses_without_spread_have_no_interval() -> None:
    figure = difference(np.full(12, 1.5), np.ones(12), [f"d{i}" for i in range(12)])
    assert not figure.known
    assert figure.p == 2 * 0.5**12
    kept = known(retention(np.full(12, 0.5), np.ones(12), [f"d{i}" for i in range(12)]))
    assert kept.estimate == 0.5
    assert not kept.known


def test_parts_of_documents_won_alike_are_bounded_over_documents() -> None:
    values, names = np.tile([1.0, 0.0], 20), [f"d{i // 2}" for i in range(40)]
    figure = difference(values, np.zeros(40), names)
    assert figure.estimate == 0.5
    assert -0.1 < figure.low < 0.5 < figure.high < 1
