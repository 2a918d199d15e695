"""How alike two models' layers are on the same tokens, from a few sequences and without fitting a
translator.

Rows are tokens of both models paired by the characters they end on: `x` `[rows, sender features]`,
`y` `[rows, receiver features]`. Pure functions of float arrays; none of them centres or changes its
input in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from kvbridge.errors import EvalError
from kvbridge.eval.statistics.bootstrap import FloatArray

RELATIVE_LAMBDAS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
_DEAD = 1e-10


def _paired(x: ArrayLike, y: ArrayLike, least: int) -> tuple[FloatArray, FloatArray]:
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if a.ndim != 2 or b.ndim != 2 or len(a) != len(b):
        raise EvalError(
            "expected x [rows, features] and y [rows, features] of the same rows, "
            f"found {a.shape}, {b.shape}"
        )
    if len(a) < least:
        raise EvalError(f"expected at least {least} rows, found {len(a)}: take more sequences")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise EvalError("found NaN or infinity among the features: leave these rows out first")
    return a, b


def linear_cka(x: ArrayLike, y: ArrayLike, *, debiased: bool = True) -> float:
    """Linear centred kernel alignment of `x` `[rows, p]` and `y` `[rows, q]`; NaN if one is
    constant.

    Biased (Kornblith et al., arXiv 1905.00414, eq. 3): `‖Yᶜᵀ Xᶜ‖² / (‖Xᶜᵀ Xᶜ‖ ‖Yᶜᵀ Yᶜ‖)`. It nears
    1 for any two matrices with fewer rows than features, so the default replaces each HSIC by Song
    et al.'s unbiased estimator (JMLR 13, 2012): unrelated matrices then score about 0, and a value
    below 0 is possible.
    """
    a, b = _paired(x, y, 4 if debiased else 2)
    grams = [centred @ centred.T for centred in (a - a.mean(axis=0), b - b.mean(axis=0))]
    hsic = _unbiased_hsic if debiased else _hsic
    cross, own, other = hsic(grams[0], grams[1]), hsic(grams[0], grams[0]), hsic(grams[1], grams[1])
    return float(cross / np.sqrt(own * other)) if own > 0 and other > 0 else float("nan")


def _hsic(k: FloatArray, m: FloatArray) -> float:
    return float((k * m).sum())


def _unbiased_hsic(k: FloatArray, m: FloatArray) -> float:
    """`(tr(K̃M̃) + 1ᵀK̃1·1ᵀM̃1/((n−1)(n−2)) − 2/(n−2)·1ᵀK̃M̃1) / (n(n−3))`, diagonals set to 0."""
    n = len(k)
    k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
    rows_k, rows_m = k.sum(axis=0), m.sum(axis=0)
    inner = (
        (k * m).sum()
        + rows_k.sum() * rows_m.sum() / ((n - 1) * (n - 2))
        - 2 / (n - 2) * (rows_k @ rows_m)
    )
    return float(inner / (n * (n - 3)))


def canonical_correlations(x: ArrayLike, y: ArrayLike, *, variance: float = 0.99) -> FloatArray:
    """Canonical correlations `[min(kept)]`, descending, of the leading principal components of each
    side.

    SVCCA (Raghu et al., arXiv 1706.05806): keep the components that hold `variance` of each side,
    then the singular values of `Uₓᵀ U_y`. Raises EvalError unless the rows exceed the components
    kept on both sides together, where correlations of 1 would come from the count alone.
    """
    if not 0 < variance <= 1:
        raise EvalError(f"variance must lie in (0, 1], found {variance}")
    a, b = _paired(x, y, 3)
    bases = []
    for matrix in (a, b):
        left, singular, _ = np.linalg.svd(matrix - matrix.mean(axis=0), full_matrices=False)
        power = np.cumsum(singular**2)
        if power[-1] <= 0:
            return np.zeros(0)
        keep = int(np.searchsorted(power, variance * power[-1] * (1 - 1e-12))) + 1
        keep = min(keep, int((singular > 1e-10 * singular[0]).sum()))
        bases.append(left[:, :keep])
    kept = bases[0].shape[1] + bases[1].shape[1]
    if len(a) <= kept:
        raise EvalError(
            f"{kept} components need more than {kept} rows, found {len(a)}: take more rows or less "
            "variance"
        )
    return np.clip(np.linalg.svd(bases[0].T @ bases[1], compute_uv=False), 0.0, 1.0)


def held_out_r2(
    x: ArrayLike,
    y: ArrayLike,
    documents: Sequence[str],
    *,
    folds: int = 4,
    relative_lambdas: Sequence[float] = RELATIVE_LAMBDAS,
) -> FloatArray:
    """Held-out R² of ridge from `x` to each column of `y`, split by document: `[receiver
    features]`.

    `1 − Σ (y − ŷ)² / Σ (y − ȳ_train)²` over all folds, against the training mean, so that 0 is a
    constant guess; NaN for dead columns, never clipped. λ = α · the mean diagonal of the training
    Gram, α by generalised cross-validation inside the training rows. Raises EvalError with fewer
    documents than two folds need.
    """
    a, b = _paired(x, y, 4)
    if len(documents) != len(a):
        raise EvalError(f"expected one document per row, found {len(documents)} for {len(a)} rows")
    names = sorted(set(documents))
    folds = min(folds, len(names))
    if folds < 2:
        raise EvalError(
            "expected at least 2 documents to hold one out, found 1: take more sequences"
        )
    fold_of = {name: index % folds for index, name in enumerate(names)}
    fold = np.array([fold_of[name] for name in documents])
    missed, spread = np.zeros(b.shape[1]), np.zeros(b.shape[1])
    for held in range(folds):
        train, test = fold != held, fold == held
        guess = _ridge(a[train], b[train], a[test], relative_lambdas)
        missed += ((b[test] - guess) ** 2).sum(axis=0)
        spread += ((b[test] - b[train].mean(axis=0)) ** 2).sum(axis=0)
    alive = spread > _DEAD * (b**2).sum(axis=0).clip(min=np.finfo(float).tiny)
    return np.where(alive, 1 - missed / np.where(alive, spread, 1.0), np.nan)


def _ridge(
    x: FloatArray, y: FloatArray, new: FloatArray, relative_lambdas: Sequence[float]
) -> FloatArray:
    """Predictions for `new` `[new rows, p]`; centred ridge by one SVD of `x`, λ by GCV summed over
    columns of `y`."""
    centre, mean = x.mean(axis=0), y.mean(axis=0)
    left, singular, right = np.linalg.svd(x - centre, full_matrices=False)
    projected, power, n = left.T @ (y - mean), singular**2, len(x)
    outside = ((y - mean) ** 2).sum() - (projected**2).sum()
    scale = power.sum() / x.shape[1] or 1.0

    def criterion(relative: float) -> float:
        shrink = power / (power + relative * scale)
        left_over = (((1 - shrink)[:, None] * projected) ** 2).sum() + outside
        return float(n * left_over / max(n - 1 - shrink.sum(), 1e-9) ** 2)

    chosen = min(relative_lambdas, key=criterion) * scale
    return mean + (new - centre) @ right.T @ ((singular / (power + chosen))[:, None] * projected)


def r2_over_tokens(
    x: ArrayLike,
    token_features: ArrayLike,
    y: ArrayLike,
    documents: Sequence[str],
    *,
    folds: int = 4,
) -> tuple[float, float]:
    """Mean held-out R² of `y` from `token_features` `[rows, features]` alone, and from these and
    `x` together.

    The difference is what the sender's cache adds to what the receiver knows of its own tokens.
    """
    tokens, sender = np.asarray(token_features, dtype=np.float64), np.asarray(x, dtype=np.float64)
    alone = held_out_r2(tokens, y, documents, folds=folds)
    both = held_out_r2(np.hstack([_unit(tokens), _unit(sender)]), y, documents, folds=folds)
    return _mean(alone), _mean(both)


def _unit(matrix: FloatArray) -> FloatArray:
    """Scaled to a total variance of 1 per block, so that one λ means the same for both blocks."""
    variance = matrix.var(axis=0).sum()
    return matrix / np.sqrt(variance) if variance > 0 else matrix


def _mean(values: FloatArray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")
