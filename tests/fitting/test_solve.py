"""Every registered solver against scikit-learn and a float64 loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor

from kvbridge.errors import FitError
from kvbridge.fitting.solve import JITTER, SOLVERS, cholesky

PENALTIES = (1e-6, 1e-2, 1.0, 100.0)


def problem(rows: int, p: int, q: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Centred x, y, XX, XY; columns differ in scale by up to 10^4."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x = draw(rows, p) * torch.logspace(-2, 2, p, dtype=torch.float64)
    y = x @ draw(p, q) + draw(rows, q)
    x, y = x - x.mean(0), y - y.mean(0)
    return x, y, x.T @ x, x.T @ y


@pytest.mark.parametrize("solver", SOLVERS)
def test_equals_ridge_along_the_path(solver):
    x, y, xx, xy = problem(60, 7)
    maps, jitters = SOLVERS[solver](xx, xy, PENALTIES)
    assert jitters == [0.0] * len(PENALTIES)
    for weights, penalty in zip(maps, PENALTIES, strict=True):
        oracle = Ridge(alpha=penalty, fit_intercept=False, solver="svd").fit(x.numpy(), y.numpy())
        np.testing.assert_allclose(weights.numpy(), oracle.coef_.T, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("solver", SOLVERS)
def test_equals_a_plain_loop(solver):
    """Gauss-Seidel on the normal equations, row by row, until nothing moves."""
    _, _, xx, xy = problem(40, 4)
    penalty = 5.0
    weights = SOLVERS[solver](xx, xy, [penalty])[0][0]
    slow = [[0.0] * xy.shape[1] for _ in range(4)]
    for _ in range(20_000):
        moved = 0.0
        for i in range(4):
            for c in range(xy.shape[1]):
                rest = sum(float(xx[i, j]) * slow[j][c] for j in range(4) if j != i)
                value = (float(xy[i, c]) - rest) / (float(xx[i, i]) + penalty)
                moved = max(moved, abs(value - slow[i][c]))
                slow[i][c] = value
        if moved < 1e-13:
            break
    torch.testing.assert_close(
        weights, torch.tensor(slow, dtype=torch.float64), rtol=1e-8, atol=1e-10
    )


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_penalty_is_least_squares_and_a_huge_one_is_zero(solver):
    x, y, xx, xy = problem(50, 6)
    none, huge = SOLVERS[solver](xx, xy, [1e-12, 1e14])[0]
    torch.testing.assert_close(none, torch.linalg.lstsq(x, y).solution, rtol=1e-6, atol=1e-8)
    assert float(huge.abs().max()) < 1e-8


@pytest.mark.parametrize("solver", SOLVERS)
def test_solves_a_singular_gram(solver):
    """Fewer rows than columns, a column twice and a dead column: finite, residual as small as least
    squares'."""
    x, y, _, _ = problem(5, 9)
    x = torch.cat((x, x[:, :1], torch.zeros(5, 1, dtype=torch.float64)), dim=1)
    xx, xy = x.T @ x, x.T @ y
    weights = SOLVERS[solver](xx, xy, [1e-6])[0][0]
    assert bool(weights.isfinite().all())
    assert float((y - x @ weights).abs().max()) < 1e-3
    assert float(weights[-1].abs().max()) == 0


@pytest.mark.parametrize("solver", SOLVERS)
def test_arguments_are_not_modified(solver):
    _, _, xx, xy = problem(20, 4)
    kept = xx.clone(), xy.clone()
    SOLVERS[solver](xx, xy, PENALTIES)
    assert torch.equal(xx, kept[0])
    assert torch.equal(xy, kept[1])


@pytest.mark.parametrize("solver", [s for s in SOLVERS if s != "cholesky"])
def test_all_solvers_agree(solver):
    _, _, xx, xy = problem(30, 8)
    for a, b in zip(
        SOLVERS[solver](xx, xy, PENALTIES)[0], cholesky(xx, xy, PENALTIES)[0], strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


def test_jitter_is_recorded_and_the_last_step_is_a_refusal():
    base = torch.ones(3, 3, dtype=torch.float64)
    xy = torch.ones(3, 1, dtype=torch.float64)
    maps, jitters = cholesky(base, xy, [0.0])
    assert jitters[0] in JITTER[1:]
    assert float((base @ maps[0] - xy).abs().max()) < 1e-3
    slightly = base + 1e-9 * (torch.eye(3, dtype=torch.float64) - base)
    slightly[0, 1] = slightly[1, 0] = 1 + 1e-7
    assert cholesky(slightly, xy, [0.0])[1][0] == JITTER[-1]
    indefinite = base.clone()
    indefinite[0, 1] = indefinite[1, 0] = 2
    with pytest.raises(FitError, match="indefinite"):
        cholesky(indefinite, xy, [0.0])
