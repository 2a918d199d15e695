"""From signals to one number: a small regularised logistic regression, kept as plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from kvbridge.codec import Finite
from kvbridge.errors import DataError, UsageError

CLIP = 6.0
STRENGTHS = (0.003, 0.03, 0.3)
FOLDS = 4


@dataclass(frozen=True)
class Score:
    """Predicted probability of damage: standardised columns, cut off at ±CLIP, times `weights`,
    plus `intercept`."""

    columns: Annotated[tuple[str, ...], Meta(min_length=1)]
    mean: tuple[Finite, ...]
    scale: tuple[Annotated[float, Meta(gt=0, lt=1e30)], ...]
    weights: tuple[Finite, ...]
    intercept: Finite

    def __post_init__(self) -> None:
        if len(set(self.columns)) != len(self.columns):
            raise UsageError(f"expected each column once, found {', '.join(self.columns)[:200]}")
        lengths = [len(self.mean), len(self.scale), len(self.weights)]
        if lengths != [len(self.columns)] * 3:
            raise UsageError(
                f"expected {len(self.columns)} numbers as mean, scale and weights, found {lengths}"
            )

    def of(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Scores `[n]` of rows `[n, columns]`."""
        x = (np.asarray(rows, dtype=np.float64) - np.asarray(self.mean)) / np.asarray(self.scale)
        z = np.clip(x, -CLIP, CLIP) @ np.asarray(self.weights) + self.intercept
        return 1.0 / (1.0 + np.exp(-z))

    def __call__(self, values: Mapping[str, float]) -> float:
        """The score of one request."""
        return float(self.of([[values[c] for c in self.columns]])[0])


def fit_score(
    columns: Sequence[str], rows: ArrayLike, damaged: ArrayLike, documents: Sequence[str]
) -> tuple[Score, NDArray[np.float64]]:
    """Logistic regression with an L2 penalty chosen by cross-validation over documents; rows `[n,
    columns]`, damaged `[n]`.

    Also returns what each request scored when its document was left out `[n]`: what to expect of
    other documents. Raises DataError where one class has fewer than FOLDS members or there are too
    few documents.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss
    from sklearn.model_selection import GroupKFold

    x, y = np.asarray(rows, dtype=np.float64), np.asarray(damaged, dtype=bool)
    if min(int(y.sum()), int((~y).sum())) < FOLDS or len(set(documents)) < FOLDS:
        raise DataError(
            f"expected at least {FOLDS} damaged and {FOLDS} undamaged requests of {FOLDS} "
            f"documents to fit a score, found {int(y.sum())} and {int((~y).sum())} of "
            f"{len(set(documents))}; give more texts or another label"
        )
    mean, scale = x.mean(0), np.maximum(x.std(0), 1e-6)
    z = np.clip((x - mean) / scale, -CLIP, CLIP)
    held = np.full((len(STRENGTHS), len(y)), float(y.mean()))
    for number, strength in enumerate(STRENGTHS):
        for train, test in GroupKFold(FOLDS).split(z, y, list(documents)):
            if len(set(y[train])) == 2:
                model = LogisticRegression(C=strength, max_iter=500).fit(z[train], y[train])
                held[number, test] = model.predict_proba(z[test])[:, 1]
    chosen = int(np.argmin([log_loss(y, h, labels=[False, True]) for h in held]))
    best = LogisticRegression(C=STRENGTHS[chosen], max_iter=500).fit(z, y)
    score = Score(
        tuple(columns),
        _digits(mean),
        _digits(scale),
        _digits(best.coef_[0]),
        _digits(best.intercept_)[0],
    )
    return score, held[chosen]


def _digits(values: Iterable[float]) -> tuple[float, ...]:
    """Rounded to eight digits: the same on every machine."""
    return tuple(float(f"{v:.8g}") for v in values)
