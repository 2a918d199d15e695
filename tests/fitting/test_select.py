"""Every registered selector finds what was planted; λ, support and controls come from the right
moments."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.layout import FEATURES, make_layout
from kvbridge.fitting.moments import Moments
from kvbridge.fitting.select import SELECTORS, greedy, relative_order, top_k
from kvbridge.fitting.train import largest_map, solve_controls, solve_maps

LAMBDAS = (1e-6, 1e-3, 1e-1, 10.0)


def support(maps, layer: int, stream: str) -> tuple[int, ...]:
    return tuple(b.layer for b in maps.translator.maps.groups[layer, stream][0].blocks)


def weights(translator, layer: int, stream: str) -> tuple[torch.Tensor, torch.Tensor]:
    name = f"target.{layer}.{stream}"
    return translator.tensors[f"{name}.W"], translator.tensors[f"{name}.b"]


def planted_reads(sender_layers: int, receiver_layers: int) -> dict[int, dict[int, float]]:
    """The two sender layers nearest in relative depth, in equal parts: a setting that is fair to
    every selector."""
    reads = {}
    for layer in range(receiver_layers):
        order = relative_order(sender_layers, layer / max(1, receiver_layers - 1))
        reads[layer] = {order[0]: 1.0, order[1]: 1.0}
    return reads


@pytest.mark.parametrize("selection", SELECTORS)
@pytest.mark.parametrize("candidates", [None, 4])
def test_every_selector_finds_a_planted_dependence_on_two_layers(
    selection, candidates, geometry, planted
):
    sender, receiver = geometry("s", 6), geometry("r", 3)
    reads = planted_reads(6, 3)
    config = FitConfig(
        layers=2,
        selection=selection,
        receiver_features="none",
        lambdas=LAMBDAS,
        candidates=candidates,
    )
    data = planted(sender, receiver, reads, candidates=2 if selection == "nearest" else candidates)
    maps = solve_maps(sender, receiver, data.train, data.validation, config)
    for layer, sources in reads.items():
        for stream in ("k", "v"):
            assert support(maps, layer, stream) == tuple(sorted(sources))
            own = data.validation.normal(
                [((i, stream), None) for i in sorted(sources)], (layer, stream)
            )
            w, b = weights(maps.translator, layer, stream)
            assert float(own.r2(w.double(), b.double()).min()) > 0.999


@pytest.mark.parametrize("selection", [s for s in SELECTORS if s != "nearest"])
def test_far_layers_are_found_where_depth_says_nothing(selection, geometry, planted):
    sender, receiver = geometry("s", 5), geometry("r", 2)
    reads = {0: {3: 1.0, 4: 0.8}, 1: {0: 1.0, 2: 0.9}}
    config = FitConfig(layers=2, selection=selection, receiver_features="none", lambdas=LAMBDAS)
    data = planted(sender, receiver, reads)
    maps = solve_maps(sender, receiver, data.train, data.validation, config)
    assert {layer: set(support(maps, layer, "v")) for layer in reads} == {0: {3, 4}, 1: {0, 2}}
    table = maps.single_layer_r2["k"]
    assert [len(row) for row in table] == [5, 5]
    assert max((v, i) for i, v in enumerate(table[0]) if v is not None)[1] == 3


def test_top_k_ranks_single_scores_and_breaks_ties_by_layer():
    scores = {(0,): 0.1, (1,): 0.5, (2,): 0.5, (3,): float("-inf"), (4,): 0.4}
    assert top_k(scores.__getitem__, [4, 3, 2, 1, 0], 2) == (1, 2)
    assert top_k(scores.__getitem__, [4, 3, 2, 1, 0], 1) == (1,)
    assert top_k(scores.__getitem__, [0, 3], 8) == (0, 3)


def test_greedy_prefers_a_complement_over_a_copy_and_stops_when_nothing_helps():
    """Layers 0 and 1 say the same, layer 2 adds to them: the published rule takes the copy, forward
    selection does not."""
    parts = {0: {"a"}, 1: {"a"}, 2: {"b"}}
    worth = {"a": 0.6, "b": 0.3}

    def joint(layers: tuple[int, ...]) -> float:
        return sum(worth[part] for part in set().union(*(parts[i] for i in layers)))

    assert top_k(joint, [0, 1, 2], 2) == (0, 1)
    assert greedy(joint, [0, 1, 2], 2) == (0, 2)
    assert greedy(joint, [0, 1, 2], 3) == (0, 2)


@pytest.mark.parametrize("selection", SELECTORS)
@pytest.mark.parametrize("k", [1, 3, 9])
def test_selectors_return_sorted_layers_of_the_candidates(selection, k):
    candidates = [4, 3, 5, 2]
    chosen = SELECTORS[selection](lambda layers: -float(sum(layers)), candidates, k)
    assert chosen == tuple(sorted(set(chosen)))
    assert set(chosen) <= set(candidates)
    assert 1 <= len(chosen) <= min(k, 4)


def test_relative_order_starts_at_the_matching_depth():
    assert relative_order(5, 0.0)[0] == 0
    assert relative_order(5, 1.0)[0] == 4
    assert relative_order(5, 0.5)[:3] == [2, 1, 3]
    assert relative_order(1, 0.7) == [0]


def test_penalty_is_chosen_per_layer_and_stream_on_validation(geometry, planted):
    """Layer 0 is a clean map, layer 1 pure noise: λ is the least for the one, the greatest for the
    other."""
    sender, receiver = geometry("s", 2), geometry("r", 2)
    config = FitConfig(layers=2, selection="nearest", receiver_features="none", lambdas=LAMBDAS)
    data = planted(sender, receiver, {0: {0: 1.0}}, noise=1e-3, rows=60)
    maps = solve_maps(sender, receiver, data.train, data.validation, config)
    assert {k: v for k, v in maps.lambdas.items() if k[0] == "0"} == {"0.k": 1e-6, "0.v": 1e-6}
    assert {k: v for k, v in maps.lambdas.items() if k[0] == "1"} == {"1.k": 10.0, "1.v": 10.0}


def test_penalty_is_relative_to_the_scale_of_the_inputs(geometry, planted):
    """The same data in units a thousand times larger or with ten times the rows keeps its λ and its
    predictions."""
    sender, receiver = geometry("s", 2), geometry("r", 1)
    config = FitConfig(layers=2, selection="nearest", receiver_features="none", lambdas=(0.3,))
    layout = make_layout(sender, receiver, features=True, candidates=None)
    generator = torch.Generator().manual_seed(0)
    p, q = sum(w for _, w in layout.inputs), sum(w for _, w in layout.targets)
    x, y = (torch.randn(80, n, generator=generator, dtype=torch.float64) for n in (p, q))
    rescaled = []
    for scale, copies in ((1.0, 1), (1000.0, 1), (1.0, 10)):
        moments = Moments(layout)
        for _ in range(copies):
            moments.update(scale * x, y)
        maps = solve_maps(sender, receiver, moments, moments, config)
        rescaled.append(scale * weights(maps.translator, 0, "k")[0])
    torch.testing.assert_close(rescaled[1], rescaled[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rescaled[2], rescaled[0], rtol=1e-4, atol=1e-5)


def test_validation_rows_do_not_enter_the_maps(geometry, planted):
    sender, receiver = geometry("s", 2), geometry("r", 1)
    config = FitConfig(layers=2, selection="nearest", receiver_features="none", lambdas=(1e-3,))
    one, other = (
        planted(sender, receiver, {0: {0: 1.0}}),
        planted(sender, receiver, {0: {0: 1.0}}, seed=9),
    )
    a = solve_maps(sender, receiver, one.train, one.validation, config).translator
    b = solve_maps(sender, receiver, one.train, other.validation, config).translator
    assert torch.equal(weights(a, 0, "k")[0], weights(b, 0, "k")[0])


@pytest.mark.parametrize("features", ["none", "embeddings", "hidden:1"])
def test_the_token_only_control_reads_no_sender(features, geometry, planted):
    sender, receiver = geometry("s", 2), geometry("r", 2)
    config = FitConfig(layers=2, selection="nearest", receiver_features=features, lambdas=LAMBDAS)
    data = planted(sender, receiver, {0: {0: 1.0}, 1: {1: 1.0}})
    controls = solve_controls(sender, receiver, data.train, data.validation, config).translator
    assert controls.sender_layers == ()
    assert controls.receiver_features == ("embeddings" if features == "none" else features)
    assert controls.maps.features
    for (layer, stream), (group,) in controls.maps.groups.items():
        assert group.blocks == ()
        assert weights(controls, layer, stream)[0].shape == (5, 8)
    held = data.validation.normal([(FEATURES, None)], (0, "k"))
    w, b = weights(controls, 0, "k")
    assert float(held.r2(w.double(), b.double()).max()) < 0.2, "nothing planted reads the features"


def test_largest_map_counts_the_inputs_of_the_widest_group(geometry):
    sender, receiver = geometry("s", 4), geometry("r", 4, 4)
    config = FitConfig(layers=3, receiver_features="none")
    assert largest_map(sender, receiver, config) == 3 * 8
    assert (
        largest_map(sender, receiver, replace(config, receiver_features="embeddings")) == 3 * 8 + 5
    )
    assert largest_map(sender, receiver, replace(config, layers=9)) == 4 * 8
    assert largest_map(sender, receiver, replace(config, family="head-local")) == 3 * 4
