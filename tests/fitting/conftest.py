"""Made-up geometries and layouts, so that statistics, solvers and selection are tried without a
model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from torch import Tensor

from kvbridge.fitting.layout import Layout, make_layout
from kvbridge.fitting.moments import Moments
from kvbridge.geometry import KVGeometry
from tests.fitting.made import make_geometry, make_planted, rows_for


@pytest.fixture
def geometry() -> Callable[..., KVGeometry]:
    """Makes a geometry: `geometry(name, layers=, heads=, width=, hidden=)`."""
    return make_geometry


@pytest.fixture
def layout() -> Layout:
    """Features and two sender layers, two receiver layers, everything gathered."""
    return make_layout(
        make_geometry("sender", 2),
        make_geometry("receiver", 2, 3, 2),
        features=True,
        candidates=None,
    )


@pytest.fixture
def rows() -> Callable[..., tuple[Tensor, Tensor]]:
    """Makes rows: `rows(layout, count, seed=, offset=)`."""
    return rows_for


@pytest.fixture
def gathered() -> Callable[..., Moments]:
    """Makes moments of rows: `gathered(layout, x, y, precision=)`."""

    def make(layout: Layout, x: Tensor, y: Tensor, precision: str = "float64") -> Moments:
        moments = Moments(layout, precision=precision)
        moments.update(x, y)
        return moments

    return make


@pytest.fixture
def planted() -> Callable[..., SimpleNamespace]:
    """Makes a pair whose receiver layer reads chosen sender layers: see `make_planted`."""
    return make_planted
