"""Geometry of the report's charts: figures to percentages of a drawing's width and height.

The template draws them as inline SVG whose text keeps its size at any width, because only positions
are relative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbridge.eval.conditions.names import label, ordered
from kvbridge.eval.report import display

VIRIDIS = (
    "#440154",
    "#482878",
    "#3e4989",
    "#31688e",
    "#26828e",
    "#1f9e89",
    "#35b779",
    "#6ece58",
    "#b5de2b",
    "#fde725",
)
MANY_CELLS = 4000


@dataclass(frozen=True)
class Bar:
    name: str
    label: str
    role: str
    start: float
    width: float
    low: float | None
    high: float | None
    text: str
    ci: str


@dataclass(frozen=True)
class Bars:
    bars: list[Bar]
    zero: float
    one: float


def recovery_bars(summary: Mapping[str, Any]) -> Bars | None:
    """One bar per condition with a recovery, from 0, in percent of the axis; None without any."""
    shown = {
        name: summary["conditions"][name]
        for name in ordered(summary["conditions"])
        if summary["conditions"][name]["recovery"] is not None
    }
    if not shown:
        return None
    ends: list[float] = []
    for condition in shown.values():
        ends += [condition["recovery"], *(condition["recovery_ci"] or [])]
    low, high = min(0.0, max(-0.5, min(ends))), max(1.0, min(1.5, max(ends)))

    def at(value: float) -> float:
        return round(100 * (min(max(value, low), high) - low) / (high - low), 3)

    bars = []
    for name, condition in shown.items():
        value, ci = condition["recovery"], condition["recovery_ci"]
        left, right = sorted((at(0.0), at(value)))
        bars.append(
            Bar(
                name=name,
                label=label(name),
                role=display.role(name),
                start=left,
                width=round(right - left, 3),
                low=at(ci[0]) if ci else None,
                high=at(ci[1]) if ci else None,
                text=display.number(value, "percent"),
                ci=display.interval(ci, "percent"),
            )
        )
    return Bars(bars, at(0.0), at(1.0))


@dataclass(frozen=True)
class Cell:
    row: int
    column: int
    fill: str | None
    title: str


@dataclass(frozen=True)
class Heat:
    rows: int
    columns: int
    cells: list[Cell]
    low: float
    high: float
    row_ticks: list[int]
    column_ticks: list[int]
    best: str


def heat_map(matrix: Sequence[Sequence[float | None]] | None) -> Heat | None:
    """R² `[receiver layers, sender layers]` as coloured cells; negative ones take the lowest
    colour, null ones none."""
    if not matrix or not matrix[0] or len({len(row) for row in matrix}) != 1:
        return None
    values = [
        [float(v) if v is not None and math.isfinite(v) else None for v in row] for row in matrix
    ]
    known = [(v, r, c) for r, row in enumerate(values) for c, v in enumerate(row) if v is not None]
    if not known:
        return None
    low, high = max(0.0, min(known)[0]), max(max(known)[0], 0.0)
    titled = len(known) <= MANY_CELLS
    cells = [
        Cell(r, c, _colour(v, low, high), f"receiver {r}, sender {c}: {v:.3f}" if titled else "")
        for v, r, c in known
    ]
    value, row, column = max(known)
    best = (
        f"The best single source is sender layer {column} for receiver layer {row}, R² {value:.2f}."
    )
    return Heat(
        len(values),
        len(values[0]),
        cells,
        low,
        high,
        _ticks(len(values)),
        _ticks(len(values[0])),
        best,
    )


def _colour(value: float, low: float, high: float) -> str:
    """Viridis between its ten anchors."""
    place = (
        (min(max(value, low), high) - low) / (high - low) * (len(VIRIDIS) - 1)
        if high > low
        else 0.0
    )
    first = min(int(place), len(VIRIDIS) - 2)
    pairs = zip(*(_channels(VIRIDIS[first + step]) for step in (0, 1)), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - first)):02x}" for a, b in pairs)


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _ticks(count: int, most: int = 8) -> list[int]:
    step = next(s for s in (1, 2, 4, 5, 10, 20, 50, 100, 1000) if count / s <= most or s == 1000)
    return list(range(0, count, step))


@dataclass(frozen=True)
class ChartLine:
    """Points in percent, y downwards, and the axis values at bottom and top."""

    points: list[tuple[float, float]]
    path: str
    low: float
    high: float


def line(x: Sequence[float], y: Sequence[float | None], low: float, high: float) -> ChartLine:
    """Points of y over x; x spans the width, y runs from `low` to `high` and is cut to it."""
    left, right = min(x), max(x)
    points = [
        (
            round(100 * (a - left) / (right - left), 3) if right > left else 50.0,
            round(100 - 100 * (min(max(b, low), high) - low) / ((high - low) or 1.0), 3),
        )
        for a, b in zip(x, y, strict=True)
        if b is not None and math.isfinite(b)
    ]
    return ChartLine(points, " ".join(f"{a},{b}" for a, b in points), low, high)


def layer_line(values: Sequence[float | None] | None) -> ChartLine | None:
    """A cosine per layer on an axis from 0 (or below) to 1."""
    known = [v for v in values or () if v is not None and math.isfinite(v)]
    if not values or not known:
        return None
    return line(range(len(values)), values, min(0.0, math.floor(min(known) * 5) / 5), 1.0)
