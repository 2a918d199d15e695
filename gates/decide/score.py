"""From signals to one number: a small regularised logistic regression, kept as plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvbridge.errors import CorruptFile, DataError

CLIP = 6.0
STRENGTHS = (0.003, 0.03, 0.3)
FOLDS = 4


@dataclass(frozen=True)
class Score:
    """Predicted probability of damage: standardised columns, cut off at ±CLIP, times `weights`, plus `intercept`."""

    columns: tuple[str, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    intercept: float

    def of(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Scores `[n]` of rows `[n, columns]`."""
        x = (np.asarray(rows, dtype=np.float64) - np.asarray(self.mean)) / np.asarray(self.scale)
        z = np.clip(x, -CLIP, CLIP) @ np.asarray(self.weights) + self.intercept
        return 1.0 / (1.0 + np.exp(-z))

    def __call__(self, values: Mapping[str, float]) -> float:
        """The score of one request."""
        return float(self.of([[values[c] for c in self.columns]])[0])

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` is its inverse."""
        return {
            "columns": list(self.columns),
            "mean": list(self.mean),
            "scale": list(self.scale),
            "weights": list(self.weights),
            "intercept": self.intercept,
        }

    @classmethod
    def from_json(cls, body: Any, known: frozenset[str], name: str) -> Score:
        """Raises CorruptFile for anything but finite numbers of one length over `known` columns."""
        if not isinstance(body, dict) or set(body) != {
            "columns",
            "mean",
            "scale",
            "weights",
            "intercept",
        }:
            raise CorruptFile(
                f"{name}: expected a score's columns, mean, scale, weights and intercept"
            )
        columns = body["columns"]
        if not isinstance(columns, list) or not columns or not all(type(c) is str for c in columns):
            raise CorruptFile(f"{name}: expected the names of a score's columns")
        if len(set(columns)) != len(columns) or not set(columns) <= known:
            raise CorruptFile(
                f"{name}: columns stand twice or are unknown: {', '.join(columns)[:200]}"
            )
        for field in ("mean", "scale", "weights"):
            numbers = body[field]
            if (
                not isinstance(numbers, list)
                or len(numbers) != len(columns)
                or not all(map(_finite, numbers))
            ):
                raise CorruptFile(f"{name}: expected {len(columns)} finite numbers as {field}")
        if not _finite(body["intercept"]) or min(body["scale"]) <= 0:
            raise CorruptFile(f"{name}: expected a finite intercept and scales above 0")
        mean, scale, weights = (
            tuple(map(float, body[field])) for field in ("mean", "scale", "weights")
        )
        return cls(tuple(columns), mean, scale, weights, float(body["intercept"]))


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30


def fit_score(
    columns: Sequence[str], rows: ArrayLike, damaged: ArrayLike, documents: Sequence[str]
) -> tuple[Score, NDArray[np.float64]]:
    """Logistic regression with an L2 penalty chosen by cross-validation over documents; rows `[n, columns]`, damaged `[n]`.

    Also returns what each request scored when its document was left out `[n]`: what to expect of other documents. Raises
    DataError where one class has fewer than FOLDS members or there are too few documents.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss
    from sklearn.model_selection import GroupKFold

    x, y = np.asarray(rows, dtype=np.float64), np.asarray(damaged, dtype=bool)
    if min(int(y.sum()), int((~y).sum())) < FOLDS or len(set(documents)) < FOLDS:
        raise DataError(
            f"expected at least {FOLDS} damaged and {FOLDS} undamaged requests of {FOLDS} documents to fit a score, found "
            f"{int(y.sum())} and {int((~y).sum())} of {len(set(documents))}; give more texts or another label"
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
    found = Score(
        tuple(columns),
        _digits(mean),
        _digits(scale),
        _digits(best.coef_[0]),
        _digits(best.intercept_)[0],
    )
    return found, held[chosen]


def _digits(values: Iterable[float]) -> tuple[float, ...]:
    """Rounded to eight digits: the same on every machine."""
    return tuple(float(f"{v:.8g}") for v in values)
