"""Moments against plain arithmetic and scikit-learn: streaming, merging, slicing, and large means
in float32."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge

from kvbridge.errors import UsageError
from kvbridge.fitting.layout import FEATURES, Layout, make_layout
from kvbridge.fitting.moments import Moments, Normal
from kvbridge.fitting.solve import cholesky

ALL = [FEATURES, (0, "k"), (1, "k")]
K = (1, "k")


def whole(moments: Moments) -> Normal:
    """Normal equations of receiver layer 1's keys on everything they may read."""
    return moments.normal([(key, None) for key in ALL], K)


def same(a: Normal, b: Normal, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    assert a.n == b.n
    for name in ("x_mean", "y_mean", "xx", "xy", "yy"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=rtol, atol=atol)


def plain(layout: Layout, x: torch.Tensor, y: torch.Tensor) -> Normal:
    """The same by centring everything at once."""
    columns = torch.cat([x[:, layout.input_at[key]] for key in ALL], dim=1)
    target = y[:, layout.target_at[K]]
    dx, dy = columns - columns.mean(0), target - target.mean(0)
    return Normal(len(x), columns.mean(0), target.mean(0), dx.T @ dx, dx.T @ dy, dy.square().sum(0))


def test_normal_equals_centring_everything_at_once(layout, rows, gathered):
    x, y = rows(layout, 60, offset=3)
    same(whole(gathered(layout, x, y)), plain(layout, x, y))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cuts=st.lists(st.integers(0, 40), max_size=6), seed=st.integers(0, 5))
def test_streaming_in_any_pieces_equals_one_batch(layout, rows, gathered, cuts, seed):
    x, y = rows(layout, 40, seed, offset=2)
    moments = Moments(layout)
    for start, stop in itertools.pairwise([0, *sorted(cuts), 40]):
        moments.update(x[start:stop], y[start:stop])
    same(whole(moments), whole(gathered(layout, x, y)))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(order=st.permutations(range(5)), left=st.integers(1, 4), empty=st.booleans())
def test_merging_in_any_order_and_nesting_equals_one_batch(
    layout, rows, gathered, order, left, empty
):
    x, y = rows(layout, 45, offset=5)
    x[9:18] += 40
    parts = [gathered(layout, x[i::5], y[i::5]) for i in range(5)]
    first, second = Moments(layout), Moments(layout)
    if empty:
        first.merge(Moments(layout))
    for i in order[:left]:
        first.merge(parts[i])
    for i in order[left:]:
        second.merge(parts[i])
    first.merge(second)
    same(whole(first), plain(layout, x, y), rtol=1e-8, atol=1e-8)


def test_merge_is_associative_and_leaves_the_other_alone(layout, rows, gathered):
    parts = [gathered(layout, *rows(layout, 12, seed, offset=4 * seed)) for seed in range(3)]
    before = whole(parts[2])
    left, right = Moments(layout), Moments(layout)
    for part in parts:
        left.merge(part)
    tail = Moments(layout)
    tail.merge(parts[1])
    tail.merge(parts[2])
    right.merge(parts[0])
    right.merge(tail)
    same(whole(left), whole(right))
    same(whole(parts[2]), before, rtol=0, atol=0)


@pytest.mark.parametrize("penalty", [1e-6, 1e-2, 10.0])
def test_equals_ridge_in_fp64(layout, rows, penalty):
    x, y = rows(layout, 120, offset=2)
    moments = Moments(layout)
    for part_x, part_y in zip(x.split(17), y.split(17), strict=True):
        moments.update(part_x, part_y)
    own = whole(moments)
    weights = cholesky(own.xx, own.xy, [penalty])[0][0]
    columns = torch.cat([x[:, layout.input_at[key]] for key in ALL], dim=1)
    oracle = Ridge(alpha=penalty, solver="cholesky").fit(
        columns.numpy(), y[:, layout.target_at[K]].numpy()
    )
    np.testing.assert_allclose(weights.numpy(), oracle.coef_.T, atol=1e-8)
    np.testing.assert_allclose(own.bias(weights).numpy(), oracle.intercept_, atol=1e-8)


def test_equals_ridge_in_float32_with_a_mean_of_a_thousand_deviations(layout, rows):
    x, y = (part.float() for part in rows(layout, 300, offset=1e3))
    moments = Moments(layout, precision="float32")
    halves = [Moments(layout, precision="float32") for _ in range(2)]
    for number, (part_x, part_y) in enumerate(zip(x.split(50), y.split(50), strict=True)):
        moments.update(part_x, part_y)
        halves[number % 2].update(part_x, part_y)
    halves[0].merge(halves[1])
    columns = torch.cat([x[:, layout.input_at[key]] for key in ALL], dim=1).double()
    target = y[:, layout.target_at[K]].double()
    oracle = Ridge(alpha=1.0, solver="cholesky").fit(columns.numpy(), target.numpy())
    expected = torch.from_numpy(oracle.predict(columns.numpy()))
    for own in (whole(moments), whole(halves[0])):
        weights = cholesky(own.xx, own.xy, [1.0])[0][0]
        np.testing.assert_allclose(
            weights.numpy(), oracle.coef_.T, atol=1e-4 * float(np.abs(oracle.coef_).max())
        )
        assert float(((own.x_mean - columns.mean(0)).abs() / columns.std(0)).max()) < 1e-6
        assert float(((own.y_mean - target.mean(0)).abs() / target.std(0)).max()) < 1e-6
        predicted = columns @ weights + own.bias(weights)
        assert float((predicted - expected).abs().max()) < 1e-4 * float(target.std(0).max())


def test_single_rows_and_empty_updates(layout, rows, gathered):
    x, y = rows(layout, 9, offset=3)
    moments = Moments(layout)
    moments.update(x[:0], y[:0])
    for i in range(9):
        moments.update(x[i : i + 1], y[i : i + 1])
        moments.update(x[:0], y[:0])
    same(whole(moments), whole(gathered(layout, x, y)))
    torch.testing.assert_close(moments.x_mean, x.mean(0))
    torch.testing.assert_close(moments.y_mean, y.mean(0))


def test_update_leaves_its_arguments_alone(layout, rows):
    x, y = rows(layout, 10)
    kept = x.clone(), y.clone()
    Moments(layout).update(x, y)
    assert torch.equal(x, kept[0])
    assert torch.equal(y, kept[1])


def test_grams_are_symmetric_in_any_order_of_blocks(layout, rows, gathered):
    moments = gathered(layout, *rows(layout, 30, offset=2))
    own = whole(moments)
    torch.testing.assert_close(own.xx, own.xx.T, rtol=0, atol=1e-12 * float(own.xx.abs().max()))
    turned = moments.normal([(key, None) for key in reversed(ALL)], K)
    widths = [dict(layout.inputs)[key] for key in ALL]
    at = torch.cat([part for part in reversed(torch.arange(sum(widths)).split(widths))])
    torch.testing.assert_close(turned.xx, own.xx[at][:, at])
    torch.testing.assert_close(turned.xy, own.xy[at])


def test_parts_of_blocks_and_columns_are_slices_of_the_whole(layout, rows, gathered):
    moments = gathered(layout, *rows(layout, 30, offset=2))
    own = whole(moments)
    part = moments.normal([(FEATURES, None), ((1, "k"), slice(4, 8))], K, slice(2, 4))
    at = torch.tensor([*range(5), *range(5 + 8 + 4, 5 + 8 + 8)])
    torch.testing.assert_close(part.xx, own.xx[at][:, at])
    torch.testing.assert_close(part.xy, own.xy[at][:, 2:4])
    torch.testing.assert_close(part.yy, own.yy[2:4])


def test_symmetric_products_are_gathered_once(layout):
    """The bytes held are those the plan states, less than all products of all columns."""
    moments = Moments(layout)
    held = sum(t.nbytes for t in (*moments._xx.values(), *moments._xy.values()))
    p, q = sum(w for _, w in layout.inputs), sum(w for _, w in layout.targets)
    assert held + 8 * (2 * p + 3 * q) == layout.nbytes
    assert held < 8 * (p * p + p * q)
    assert not any(
        a != b and a in layout.partners[b] for a in layout.partners for b in layout.partners[a]
    )


def test_blocks_beyond_the_candidates_are_refused(geometry, rows, gathered):
    layout = make_layout(geometry("s", 4), geometry("r", 4), features=True, candidates=2)
    moments = gathered(layout, *rows(layout, 20))
    assert layout.reads[0, "k"] == (0, 1)
    moments.normal([((0, "k"), None), ((1, "k"), None)], (0, "k"))
    with pytest.raises(UsageError, match="not gathered"):
        moments.normal([((3, "k"), None)], (0, "k"))
    with pytest.raises(UsageError, match="not gathered"):
        moments.normal([((0, "k"), None), ((3, "k"), None)], (0, "k"))
    with pytest.raises(UsageError, match="not gathered"):
        moments.normal([((0, "v"), None)], (0, "k"))


def test_fewer_candidates_give_the_same_slices(geometry, rows, gathered):
    full = make_layout(geometry("s", 5), geometry("r", 2), features=True, candidates=None)
    some = make_layout(geometry("s", 5), geometry("r", 2), features=True, candidates=3)
    assert some.nbytes < full.nbytes
    x, y = rows(full, 25, offset=1)
    support = [(FEATURES, None), *(((layer, "v"), None) for layer in sorted(some.reads[1, "v"]))]
    same(
        gathered(some, x, y).normal(support, (1, "v")),
        gathered(full, x, y).normal(support, (1, "v")),
    )


def test_misuse_is_refused(layout, rows, geometry, gathered):
    x, y = rows(layout, 5)
    moments = Moments(layout)
    with pytest.raises(UsageError, match="no rows"):
        whole(moments)
    for bad_x, bad_y in ((x[:, 1:], y), (x, y[:, 1:]), (x[1:], y)):
        with pytest.raises(UsageError, match="expected rows"):
            moments.update(bad_x, bad_y)
    other = make_layout(geometry("s", 1), geometry("r", 1), features=False, candidates=None)
    with pytest.raises(UsageError, match="same layout"):
        moments.merge(Moments(other))
    assert moments.n == 0


def test_squared_error_and_r2_equal_residuals_for_any_map(layout, rows, gathered):
    x, y = rows(layout, 50, offset=2)
    own = whole(gathered(layout, x, y))
    columns = torch.cat([x[:, layout.input_at[key]] for key in ALL], dim=1)
    target = y[:, layout.target_at[K]]
    generator = torch.Generator().manual_seed(1)
    weights = 0.1 * torch.randn(
        columns.shape[1], target.shape[1], generator=generator, dtype=torch.float64
    )
    bias = torch.randn(target.shape[1], generator=generator, dtype=torch.float64)
    squared = (target - columns @ weights - bias).square().sum(0)
    torch.testing.assert_close(own.squared_error(weights, bias), squared, rtol=1e-9, atol=1e-9)
    r2 = 1 - squared / (target - target.mean(0)).square().sum(0)
    torch.testing.assert_close(own.r2(weights, bias), r2, rtol=1e-9, atol=1e-9)
    assert float(r2.min()) < 0, "a map this bad must score below zero: nothing is clipped"


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_r2_is_nan_where_an_output_does_not_vary(layout, rows, gathered, precision):
    x, y = rows(layout, 50)
    dead = layout.target_at[K].start + 1
    y[:, dead] = 1234.567
    own = whole(gathered(layout, x.float(), y.float(), precision))
    weights = cholesky(own.xx, own.xy, [1e-3])[0][0]
    r2 = own.r2(weights, own.bias(weights))
    assert r2.isnan().nonzero().flatten().tolist() == [1]
