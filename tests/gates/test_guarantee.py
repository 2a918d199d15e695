"""Binomial tails against scipy and closed forms, and a simulation of what the guarantee claims."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from kvbridge.errors import UsageError
from kvbridge.gates.decide.guarantee import (
    conformal_threshold,
    fixed_sequence,
    interval,
    items_needed,
    p_value,
    start_at,
    upper_bound,
)


def test_items_needed_closed_form_and_the_known_cases():
    assert items_needed(0.02, 0.05) == 149
    assert items_needed(0.02, 0.05, failures=3) == 386
    for alpha, delta in ((0.01, 0.1), (0.1, 0.05), (0.3, 0.2)):
        assert items_needed(alpha, delta) == math.ceil(math.log(delta) / math.log(1 - alpha))


@given(st.integers(0, 5), st.floats(0.01, 0.4), st.floats(0.01, 0.3))
@settings(max_examples=40, deadline=None)
def test_items_needed_is_the_least(failures, alpha, delta):
    n = items_needed(alpha, delta, failures)
    assert p_value(failures, n, alpha) <= delta < p_value(failures, n - 1, alpha)


@given(st.integers(1, 300), st.data())
@settings(max_examples=40, deadline=None)
def test_tails_and_intervals_are_scipys(items, data):
    failures = data.draw(st.integers(0, items))
    assert p_value(failures, items, 0.1) == pytest.approx(
        binomtest(failures, items, 0.1, "less").pvalue
    )
    exact = binomtest(failures, items).proportion_ci(0.95, "exact")
    assert interval(failures, items) == pytest.approx((exact.low, exact.high))
    one_sided = binomtest(failures, items, alternative="less").proportion_ci(0.95, "exact")
    assert upper_bound(failures, items, 0.05) == pytest.approx(one_sided.high)


def test_no_item_is_no_evidence():
    assert p_value(0, 0, 0.5) == 1.0
    assert upper_bound(0, 0, 0.05) == 1.0
    assert fixed_sequence([(0.1, 0, 0)], 0.1, 0.05) is None


def test_a_fixed_sequence_stops_at_the_first_that_is_not_rejected():
    counts = [(0.1, 149, 0), (0.2, 148, 0), (0.3, 5000, 0)]
    level = fixed_sequence(counts, 0.02, 0.05)
    assert level is not None
    assert (level.threshold, level.items, level.failures) == (0.1, 149, 0)
    assert fixed_sequence(counts[1:], 0.02, 0.05) is None


@pytest.mark.parametrize(
    ("alpha", "delta"), [(0.0, 0.1), (1.0, 0.1), (0.1, 0.0), (0.1, 1.0), (float("nan"), 0.1)]
)
def test_levels_are_checked(alpha, delta):
    with pytest.raises(UsageError):
        fixed_sequence([], alpha, delta)


def test_learn_then_test_keeps_its_word():
    """True risk at threshold t is t/2; α = 0.1 is exceeded above t = 0.2. 2,000 calibrations."""
    rng, alpha, delta, n = np.random.default_rng(0), 0.1, 0.1, 400
    grid = np.linspace(0.05, 1, 20)
    violations = covered = 0
    for _ in range(2000):
        score = rng.random(n)
        damaged = rng.random(n) < score
        counts = [(t, int((score <= t).sum()), int(damaged[score <= t].sum())) for t in grid]
        level = fixed_sequence(counts[2:], alpha, delta)
        covered += level is not None
        violations += level is not None and level.threshold / 2 > alpha
    assert covered > 200
    assert binomtest(violations, 2000, delta, "greater").pvalue > 0.001
    naive = sum(
        max((t for t in grid if damaged_share(rng, n, t) <= alpha), default=0) / 2 > alpha
        for _ in range(300)
    )
    assert naive > 300 * delta * 1.5, (
        "taking the largest threshold that looks fine must break the promise"
    )


def damaged_share(rng, n, t):
    score = rng.random(n)
    inside = score <= t
    return (rng.random(n) < score)[inside].mean() if inside.any() else 0.0


def test_conformal_risk_control_holds_on_average():
    rng, alpha, n = np.random.default_rng(1), 0.05, 200
    risks = []
    for _ in range(800):
        score = rng.random(n)
        threshold = conformal_threshold(score, rng.random(n) < score, alpha)
        risks.append(0.0 if threshold is None else threshold**2 / 2)
    assert np.mean(risks) <= alpha + 3 * np.std(risks) / math.sqrt(len(risks))
    assert np.mean(risks) > 0.7 * alpha
    assert conformal_threshold([0.1, 0.2], [True, True], 0.1) is None
    assert conformal_threshold([0.1] * 99, [False] * 99, 0.01) == 0.1


def test_conformal_threshold_takes_ties_together():
    assert conformal_threshold([0.1, 0.1, 0.2], [False, True, False], 0.4) is None


def test_start_is_where_another_part_promises_most():
    counts = [(0.1, 20, 0), (0.2, 300, 1), (0.3, 900, 200)]
    assert start_at(counts, 1.0, 0.1) == 1
    assert start_at([], 1.0, 0.1) == 0
