"""The factor of a fit against scikit-learn's own whitening and the hat matrix of a regression."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

import kvbridge
from kvbridge.asset.entries import read_factors
from kvbridge.errors import CorruptFile
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.layout import make_layout
from kvbridge.fitting.leverage import factor_of, solve_factors
from kvbridge.fitting.moments import Moments
from kvbridge.fitting.train import solve_maps
from tests.fitting.made import make_geometry, rows_for
from tests.hostile.forge import made_fit, saved

LAYERS = (0, 2)


def gathered(layers: int = 3, heads: int = 2, rows: int = 400):
    """Moments of correlated rows far from zero, and the rows of LAYERS' values, `[rows,
    features]`."""
    sender, receiver = make_geometry("s", layers=layers, heads=heads), make_geometry("r")
    layout = make_layout(sender, receiver, features=True, candidates=None)
    x, y = rows_for(layout, rows, offset=3.0)
    moments = Moments(layout)
    for part in (slice(0, 90), slice(90, rows)):
        moments.update(x[part], y[part])
    return moments, torch.cat([x[:, layout.input_at[i, "v"]] for i in LAYERS], dim=1)


def content_of(rows: torch.Tensor, heads: int = 2):
    """The same rows as content by layer."""
    parts = rows.float().chunk(len(LAYERS), dim=1)
    return {i: {"v": part.unflatten(1, (heads, -1))} for i, part in zip(LAYERS, parts, strict=True)}


def test_directions_are_those_of_a_whitening_pca():
    moments, rows = gathered()
    factor = factor_of(moments, "v", LAYERS, (2, "v"))
    whitened = factor.whitened(factor.standardised(content_of(rows))).numpy()
    standard = StandardScaler().fit_transform(rows.numpy())
    oracle = PCA(whiten=True).fit_transform(standard) * np.sqrt(len(rows) / (len(rows) - 1))
    assert np.abs(whitened[:, ::-1]) == pytest.approx(np.abs(oracle), abs=2e-3)
    assert whitened.T @ whitened / len(whitened) == pytest.approx(
        np.eye(whitened.shape[1]), abs=1e-3
    )


def test_squares_sum_to_the_leverage_of_a_regression():
    """Of all directions, Σ z² / n is the diagonal of X (XᵀX)⁻¹ Xᵀ of the centred rows."""
    moments, rows = gathered()
    factor = factor_of(moments, "v", LAYERS, (2, "v"))
    z = factor.whitened(factor.standardised(content_of(rows))).double()
    centred = (rows - rows.mean(0)).numpy()
    hat = np.einsum("ij,jk,ik->i", centred, np.linalg.inv(centred.T @ centred), centred)
    assert z.square().sum(1).numpy() / len(z) == pytest.approx(hat, rel=1e-2)


def test_only_the_largest_directions_are_kept_and_the_rest_is_outside(monkeypatch):
    monkeypatch.setattr("kvbridge.fitting.leverage.RANK", 3)
    moments, rows = gathered()
    factor = factor_of(moments, "v", LAYERS, (2, "v"))
    assert factor.directions.shape == (16, 3)
    standard = StandardScaler().fit_transform(rows.numpy())
    kept = PCA(n_components=3).fit(standard).explained_variance_ratio_.sum()
    x = factor.standardised(content_of(rows))
    assert factor.outside(x, factor.whitened(x)) == pytest.approx(1 - kept, abs=1e-3)


def test_a_fit_keeps_what_the_last_layers_maps_read():
    fit = made_fit()
    assert set(fit.factors) == {"k", "v"}
    for stream, factor in fit.factors.items():
        read = {layer for layer, name in fit.translator.maps.reads(range(2, 3)) if name == stream}
        assert set(factor.layers) == read
        assert factor.directions.shape == (8 * len(read), 8 * len(read))


def test_heads_of_their_own_still_give_whole_layers():
    factors = made_fit(family="head-local").factors
    assert all(len(factor.mean) == 8 * len(factor.layers) for factor in factors.values())


def test_a_column_that_never_varies_has_no_say():
    sender, receiver = make_geometry("s"), make_geometry("r")
    layout = make_layout(sender, receiver, features=True, candidates=None)
    x, y = rows_for(layout, 200)
    x[:, layout.input_at[0, "v"].start] = 7.0
    moments = Moments(layout)
    moments.update(x, y)
    factor = factor_of(moments, "v", LAYERS, (2, "v"))
    assert bool(torch.isfinite(factor.directions).all())
    rows = torch.cat([x[:, layout.input_at[i, "v"]] for i in LAYERS], dim=1)
    assert bool(torch.isfinite(factor.whitened(factor.standardised(content_of(rows)))).all())


def test_it_comes_back_from_disk_and_the_same_moments_give_the_same_bytes(tmp_path):
    loaded = kvbridge.load_asset(saved(tmp_path / "a"))
    again = kvbridge.load_asset(saved(tmp_path / "b"))
    fit = made_fit()
    assert loaded.digest == again.digest
    assert loaded.manifest.factors["k"].rank == fit.factors["k"].directions.shape[1]
    for stream, factor in fit.factors.items():
        kept = loaded.factors[stream]
        assert (kept.stream, kept.layers) == (stream, factor.layers)
        for name in ("mean", "scale", "directions"):
            assert torch.equal(getattr(kept, name), getattr(factor, name))


def test_parameters_are_those_of_the_maps_alone(tmp_path):
    loaded = kvbridge.load_asset(saved(tmp_path / "a"))
    assert loaded.manifest.body["parameters"] == loaded.translator.parameters


def test_an_older_asset_has_none(tmp_path):
    kvbridge.save_asset(replace(made_fit(), factors={}), tmp_path / "old")
    loaded = kvbridge.load_asset(tmp_path / "old")
    assert loaded.factors == {}
    assert "leverage" not in loaded.manifest.body


def test_with_few_candidates_the_layers_still_met():
    sender, receiver = make_geometry("s", layers=6), make_geometry("r")
    layout = make_layout(sender, receiver, features=True, candidates=2)
    x, y = rows_for(layout, 200)
    moments = Moments(layout)
    moments.update(x, y)
    config = FitConfig(layers=2, candidates=2, lambdas=(1e-3,))
    maps = solve_maps(sender, receiver, moments, moments, config)
    assert set(solve_factors(moments, maps.translator)) == {"k", "v"}


def test_factors_stay_in_fp32_beside_weights_of_fewer_bits(tmp_path):
    fit = made_fit()
    kvbridge.save_asset(
        replace(fit, translator=fit.translator.to("cpu", torch.bfloat16)), tmp_path / "a"
    )
    loaded = kvbridge.load_asset(tmp_path / "a")
    assert loaded.translator.tensors["target.0.k.W"].dtype is torch.bfloat16
    assert torch.equal(loaded.factors["k"].directions, fit.factors["k"].directions)


def test_the_sign_of_a_direction_is_fixed():
    """Eigenvectors come with either sign; the largest entry says which is written."""
    moments, _ = gathered()
    directions = factor_of(moments, "v", LAYERS, (2, "v")).directions
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    assert bool((largest > 0).all())


@pytest.mark.parametrize("rank", [0, 17])
def test_a_rank_that_no_such_rows_have(rank):
    with pytest.raises(CorruptFile, match=f"rank {rank}"):
        read_factors({"v": {"layers": list(LAYERS), "rank": rank}}, make_geometry("s"), "here")


def test_rows_without_a_length_are_not_inside():
    """NaN and overflow stay what they are: a number that says "nothing lies outside" would pass for
    the usual."""
    moments, rows = gathered()
    factor = factor_of(moments, "v", LAYERS, (2, "v"))
    x = factor.standardised(content_of(rows))
    for odd in (float("nan"), 1e30):
        strange = torch.full_like(x, odd)
        assert np.isnan(factor.outside(strange, factor.whitened(strange)))
    none = torch.zeros_like(x)
    assert factor.outside(none, factor.whitened(none)) == 1
