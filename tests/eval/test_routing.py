from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.errors import EvalError
from kvbridge.eval.statistics.bootstrap import NotShown
from kvbridge.eval.statistics.routing import CallCurve, call_curve, risk_coverage


def recovered(curve: CallCurve) -> np.ndarray:
    area = curve.recovered()
    assert not isinstance(area, NotShown)
    return area


def test_a_perfect_router_by_hand() -> None:
    """Four items, weak right on two; the router sends exactly the two it would lose, in order."""
    curve = call_curve([1, 1, 0, 0], [1, 1, 1, 1], [0.1, 0.2, 0.8, 0.9])
    np.testing.assert_allclose(curve.calls, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(curve.performance, [0.5, 0.75, 1, 1, 1])
    np.testing.assert_allclose(recovered(curve), [0, 0.5, 1, 1, 1])
    assert curve.apgr() == pytest.approx(0.125 * 0.5 + 0.25 * 0.75 + 0.5)
    assert curve.cpt(0.5) == pytest.approx(0.25)
    assert curve.cpt(0.8) == pytest.approx(0.25 + 0.25 * 0.6)
    assert curve.cpt(0.0) == 0.0


def test_a_router_without_a_signal_has_apgr_one_half() -> None:
    rng = np.random.default_rng(0)
    weak, strong = (rng.random(4000) < 0.4).astype(int), (rng.random(4000) < 0.8).astype(int)
    assert call_curve(weak, strong, rng.random(4000)).apgr() == pytest.approx(0.5, abs=0.05)
    assert call_curve(weak, strong, np.zeros(4000)).apgr() == pytest.approx(0.5, abs=1e-12)


def test_no_gap_between_the_models_is_refused() -> None:
    curve = call_curve([1, 0], [0, 1], [0.1, 0.2])
    for value in (curve.recovered(), curve.apgr(), curve.cpt(0.5)):
        assert isinstance(value, NotShown)
        assert "not above" in value.because


def test_pgr_can_pass_one_before_all_calls() -> None:
    curve = call_curve([1, 0, 1], [0, 1, 1], [0.1, 0.9, 0.5])
    assert isinstance(curve.recovered(), NotShown)
    curve = call_curve([1, 0, 0], [0, 1, 1], [0.1, 0.9, 0.5])
    np.testing.assert_allclose(recovered(curve), [0, 1, 2, 1])
    assert curve.cpt(1.0) == pytest.approx(1 / 3)


losses = st.lists(st.tuples(st.floats(0, 5), st.integers(0, 3)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(losses)
def test_aurc_is_the_mean_over_every_order_of_tied_scores(scored: list[tuple[float, int]]) -> None:
    loss, score = (np.array(column, dtype=float) for column in zip(*scored, strict=True))
    n, areas = len(loss), []
    for order in itertools.permutations(range(n)):
        if all(score[a] <= score[b] for a, b in itertools.pairwise(order)):
            areas.append(np.mean(np.cumsum(loss[list(order)]) / np.arange(1, n + 1)))
    curve = risk_coverage(loss, score)
    assert curve.aurc == pytest.approx(np.mean(areas), abs=1e-12)
    assert curve.excess >= -1e-12
    assert curve.risk[-1] == pytest.approx(loss.mean())
    assert curve.coverage[-1] == 1.0


def test_risk_of_the_best_order_has_no_excess() -> None:
    loss = np.random.default_rng(0).random(50)
    assert risk_coverage(loss, loss).excess == 0.0
    assert risk_coverage(loss, -loss).excess > 0.1


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), min_size=1, max_size=40), st.randoms()
)
def test_the_order_of_items_does_not_matter(scored: list[tuple[int, int]], random) -> None:
    shuffled = list(scored)
    random.shuffle(shuffled)
    first, second = (risk_coverage(*zip(*rows, strict=True)) for rows in (scored, shuffled))
    np.testing.assert_array_equal(first.risk, second.risk)
    assert first.aurc == second.aurc


@pytest.mark.parametrize("arrays", [([], []), ([1.0], [1.0, 2.0]), ([np.nan], [1.0])])
def test_bad_input_is_refused(arrays: tuple) -> None:
    with pytest.raises(EvalError):
        risk_coverage(*arrays)
