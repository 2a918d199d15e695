from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cross_decomposition import CCA
from sklearn.linear_model import Ridge, RidgeCV

from kvbridge.errors import EvalError
from kvbridge.eval.screen.similarity import (
    canonical_correlations,
    held_out_r2,
    linear_cka,
    r2_over_tokens,
)


def matrices(
    rows: int = 200, p: int = 12, q: int = 9, noise: float = 0.5, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, p)) * rng.uniform(0.5, 2, p) + 3
    return x, x @ rng.normal(size=(p, q)) + noise * rng.normal(size=(rows, q))


def rotation(size: int, seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))[0]


@pytest.mark.parametrize("debiased", [True, False])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.floats(0.01, 100), shift=st.floats(-50, 50))
def test_cka_ignores_rotation_scale_and_shift(
    debiased: bool, seed: int, scale: float, shift: float
) -> None:
    x, y = matrices(seed=seed)
    moved = scale * x @ rotation(12, seed) + shift
    assert linear_cka(moved, y, debiased=debiased) == pytest.approx(
        linear_cka(x, y, debiased=debiased), abs=1e-8
    )
    assert linear_cka(x, moved, debiased=debiased) == pytest.approx(1.0, abs=1e-8)


def test_biased_cka_is_kornblith_s_formula_in_a_plain_loop() -> None:
    x, y = matrices(rows=30)
    a, b = x - x.mean(axis=0), y - y.mean(axis=0)
    cross = sum(float(a[:, i] @ b[:, j]) ** 2 for i in range(12) for j in range(9))
    own = sum(float(a[:, i] @ a[:, j]) ** 2 for i in range(12) for j in range(12))
    other = sum(float(b[:, i] @ b[:, j]) ** 2 for i in range(9) for j in range(9))
    assert linear_cka(x, y, debiased=False) == pytest.approx(
        cross / np.sqrt(own * other), rel=1e-12
    )


def test_unbiased_hsic_is_the_mean_over_all_quadruples() -> None:
    """Song et al.'s U-statistic by its definition: over distinct i, j, q, r of
    K_ij (L_ij + L_qr − 2 L_iq)."""
    from itertools import permutations

    from kvbridge.eval.screen.similarity import _unbiased_hsic

    x, y = matrices(rows=7, p=3, q=2)
    k, m = x @ x.T, y @ y.T
    terms = [
        k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q]) for i, j, q, r in permutations(range(7), 4)
    ]
    assert _unbiased_hsic(k, m) == pytest.approx(np.mean(terms), rel=1e-10)


def test_only_the_debiased_cka_of_unrelated_wide_matrices_is_about_zero() -> None:
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(size=(64, 400)), rng.normal(size=(64, 400))) for _ in range(10)]
    assert np.mean([linear_cka(x, y, debiased=False) for x, y in pairs]) > 0.8
    assert abs(np.mean([linear_cka(x, y) for x, y in pairs])) < 0.02


def test_cka_of_a_constant_is_nan() -> None:
    assert np.isnan(linear_cka(np.ones((10, 3)), matrices(rows=10)[1]))


def test_canonical_correlations_are_scikit_learn_s() -> None:
    x, y = matrices(noise=3.0, p=6, q=4)
    correlations = canonical_correlations(x, y, variance=1.0)
    a, b = CCA(n_components=4, max_iter=5000, tol=1e-12).fit_transform(x, y)
    oracle = [np.corrcoef(a[:, i], b[:, i])[0, 1] for i in range(4)]
    np.testing.assert_allclose(correlations, oracle, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_canonical_correlations_ignore_any_invertible_map(seed: int) -> None:
    x, y = matrices(seed=seed, noise=2.0)
    mixed = x @ (rotation(12, seed) * np.linspace(1, 2, 12))
    np.testing.assert_allclose(
        canonical_correlations(mixed, y, variance=1.0),
        canonical_correlations(x, y, variance=1.0),
        atol=1e-8,
    )


def test_canonical_correlations_refuse_what_the_count_of_rows_decides() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(EvalError, match="components need more than"):
        canonical_correlations(rng.normal(size=(20, 15)), rng.normal(size=(20, 15)), variance=1.0)
    few = canonical_correlations(
        rng.normal(size=(20, 15)) * 0.9 ** np.arange(15) ** 2, rng.normal(size=(20, 2))
    )
    assert len(few) <= 2


def documents_of(rows: int, count: int = 8) -> list[str]:
    return [f"d{i * count // rows}" for i in range(rows)]


def test_held_out_r2_is_scikit_learn_s_ridge_over_document_folds() -> None:
    x, y = matrices(noise=4.0)
    documents = documents_of(200)
    fold = np.array([int(d[1:]) % 4 for d in documents])
    missed = spread = 0.0
    for held in range(4):
        train, test = fold != held, fold == held
        centred = x[train] - x[train].mean(axis=0)
        scale = (centred**2).sum() / 12
        model = Ridge(alpha=0.01 * scale).fit(x[train], y[train])
        missed += ((y[test] - model.predict(x[test])) ** 2).sum(axis=0)
        spread += ((y[test] - y[train].mean(axis=0)) ** 2).sum(axis=0)
    np.testing.assert_allclose(
        held_out_r2(x, y, documents, relative_lambdas=[0.01]), 1 - missed / spread, rtol=1e-9
    )


def test_lambda_is_the_one_that_generalised_cross_validation_picks() -> None:
    """RidgeCV's exact leave-one-out picks the same α here; the two criteria agree where leverages
    are even."""
    x, y = matrices(rows=60, p=40, noise=30.0)
    documents = documents_of(60)
    scale = ((x - x.mean(axis=0)) ** 2).sum() / 40
    chosen = RidgeCV(alphas=np.array([1e-4, 1e-2, 1.0, 100.0]) * scale).fit(x, y).alpha_ / scale
    options = {
        a: np.nanmean(held_out_r2(x, y, documents, relative_lambdas=[a]))
        for a in (1e-4, 1e-2, 1.0, 100.0)
    }
    both = np.nanmean(held_out_r2(x, y, documents, relative_lambdas=list(options)))
    assert both == pytest.approx(options[float(f"{chosen:.4g}")], abs=0.02)


def test_held_out_r2_of_unrelated_matrices_is_not_above_zero() -> None:
    rng = np.random.default_rng(0)
    r2 = held_out_r2(rng.normal(size=(100, 300)), rng.normal(size=(100, 20)), documents_of(100))
    assert -0.2 < r2.mean() < 0.02


def test_dead_columns_are_nan_and_others_are_not_clipped() -> None:
    x, y = matrices()
    y[:, 0] = 4.0
    r2 = held_out_r2(x, y, documents_of(200))
    assert np.isnan(r2[0])
    assert (r2[1:] > 0.9).all()
    shifted = y + np.repeat(np.arange(8.0) * 40, 25)[:, None]
    assert held_out_r2(x, shifted, documents_of(200), relative_lambdas=[1e-4])[1:].min() < 0


def test_a_sender_adds_to_tokens_only_what_it_knows() -> None:
    rng = np.random.default_rng(0)
    tokens, hidden = rng.normal(size=(400, 10)), rng.normal(size=(400, 8))
    y = tokens @ rng.normal(size=(10, 6)) + hidden @ rng.normal(size=(8, 6))
    documents = documents_of(400)
    alone, both = r2_over_tokens(hidden @ rng.normal(size=(8, 30)), tokens, y, documents)
    assert 0.3 < alone < 0.8
    assert both > 0.98
    alone, both = r2_over_tokens(rng.normal(size=(400, 30)), tokens, y, documents)
    assert abs(both - alone) < 0.06


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: linear_cka(np.ones((5, 2)), np.ones((6, 2))), "of the same rows"),
        (lambda: linear_cka(np.ones((3, 2)), np.ones((3, 2))), "at least 4 rows"),
        (lambda: linear_cka(np.full((9, 2), np.nan), np.ones((9, 2))), "NaN or infinity"),
        (lambda: held_out_r2(np.ones((9, 2)), np.ones((9, 2)), ["a"] * 9), "at least 2 documents"),
        (lambda: held_out_r2(np.ones((9, 2)), np.ones((9, 2)), ["a"] * 8), "one document per row"),
        (lambda: canonical_correlations(*matrices(), variance=0.0), "variance must lie"),
    ],
)
def test_bad_input_is_refused(call, words: str) -> None:
    with pytest.raises(EvalError, match=words):
        call()
