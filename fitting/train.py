"""From moments to maps: support, λ and weights of every receiver layer and stream, all from slices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvbridge.asset.maps.translator import Block, GroupMap, Translator
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.families import FAMILIES, Group
from kvbridge.fitting.layout import FEATURES, Key
from kvbridge.fitting.memory import control_features, effective_candidates
from kvbridge.fitting.moments import Moments, Normal
from kvbridge.fitting.select import SELECTORS, relative_order
from kvbridge.fitting.solve import SOLVERS
from kvbridge.geometry import KVGeometry

SELECTION_LAMBDA = 1e-3


@dataclass(frozen=True, eq=False)
class MapSet:
    """A translator with the λ and jitter of each map (`"{layer}.{stream}"`), whether rows were too few, and the
    single-layer validation R² a selector computed, `[receiver layers][sender layers]` per stream."""

    translator: Translator
    lambdas: dict[str, float]
    jitter: dict[str, float]
    starved: bool = False
    single_layer_r2: dict[str, list[list[float | None]]] = field(default_factory=dict)


def solve_maps(
    sender: KVGeometry, receiver: KVGeometry, train: Moments, validation: Moments, config: FitConfig
) -> MapSet:
    """Solves every (receiver layer, stream): support by the configured selector, λ on validation. Modifies nothing."""
    maps, lambdas, jitter = {}, {}, {}
    singles: dict[str, list[list[float | None]]] = {}
    family, features = FAMILIES[config.family], config.receiver_features != "none"
    for layer, name in _targets(receiver):
        table: dict[int, float] = {}
        support = _support(sender, receiver, layer, name, train, validation, config, table)
        groups = family(sender, receiver, layer, name, support)
        label = f"{layer}.{name}"
        maps[layer, name], lambdas[label], jitter[label] = solve_groups(
            sender, receiver, (layer, name), groups, features, train, validation, config
        )
        if table:
            singles.setdefault(name, [[None] * len(sender.layers) for _ in receiver.layers])
            for source, value in table.items():
                singles[name][layer][source] = value
    translator = Translator(sender, receiver, config.family, config.receiver_features, maps)
    starved = train.n < 2 * largest_map(sender, receiver, config)
    return MapSet(translator, lambdas, jitter, starved, singles)


def solve_controls(
    sender: KVGeometry, receiver: KVGeometry, train: Moments, validation: Moments, config: FitConfig
) -> MapSet:
    """The token-only control: the same receiver features (embeddings where the map has none), no sender block."""
    maps, lambdas, jitter = {}, {}, {}
    for layer, name in _targets(receiver):
        heads = tuple(range(receiver.layers[layer].stream(name).heads))
        label = f"{layer}.{name}"
        maps[layer, name], lambdas[label], jitter[label] = solve_groups(
            sender, receiver, (layer, name), (Group(heads, ()),), True, train, validation, config
        )
    return MapSet(
        Translator(
            sender, receiver, "token-only", control_features(config.receiver_features), maps
        ),
        lambdas,
        jitter,
    )


def solve_groups(
    sender: KVGeometry,
    receiver: KVGeometry,
    target: Key,
    groups: tuple[Group, ...],
    features: bool,
    train: Moments,
    validation: Moments,
    config: FitConfig,
) -> tuple[tuple[GroupMap, ...], float, float]:
    """Maps of one target's groups at the λ with the best mean validation R² over all their outputs; λ and jitter beside."""
    width = receiver.layers[target[0]].stream(target[1]).width
    problems = [
        (
            _slice(train, sender, group, features, target, width),
            _slice(validation, sender, group, features, target, width),
        )
        for group in groups
    ]
    paths = [_path(fitted, config) for fitted, _ in problems]
    scores = []
    for index in range(len(config.lambdas)):
        r2 = torch.cat(
            [
                held.r2(maps[index], own.bias(maps[index]))
                for (own, held), (maps, _) in zip(problems, paths, strict=True)
            ]
        )
        scores.append(_mean(r2))
    best = max(range(len(scores)), key=lambda i: (scores[i], config.lambdas[i]))
    dtype = getattr(torch, config.weights_dtype)
    found = tuple(
        GroupMap(
            g.heads,
            g.blocks,
            features,
            _small(maps[best], dtype),
            _small(own.bias(maps[best]), dtype),
        )
        for g, (own, _), (maps, _) in zip(groups, problems, paths, strict=True)
    )
    return found, config.lambdas[best], max(jitters[best] for _, jitters in paths)


def largest_map(sender: KVGeometry, receiver: KVGeometry, config: FitConfig) -> int:
    """Inputs of the widest map the configuration will solve."""
    support = tuple(range(min(config.layers, len(sender.layers))))
    groups = [
        g
        for layer, name in _targets(receiver)
        for g in FAMILIES[config.family](sender, receiver, layer, name, support)
    ]
    extra = receiver.hidden_size if config.receiver_features != "none" else 0
    return max(sum(b.width(sender) for b in g.blocks) for g in groups) + extra


def _support(
    sender: KVGeometry,
    receiver: KVGeometry,
    layer: int,
    name: str,
    train: Moments,
    validation: Moments,
    config: FitConfig,
    table: dict[int, float],
) -> tuple[int, ...]:
    """Sender layers for one target; `table` receives single-layer scores as the selector asks for them (modified)."""
    heads = tuple(range(receiver.layers[layer].stream(name).heads))
    probe = replace(config, lambdas=(SELECTION_LAMBDA,))

    def score(layers: tuple[int, ...]) -> float:
        group = Group(heads, tuple(Block(i, name) for i in layers))
        own = _slice(train, sender, group, False, (layer, name), 0)
        held = _slice(validation, sender, group, False, (layer, name), 0)
        weights = _path(own, probe)[0][0]
        value = _mean(held.r2(weights, own.bias(weights)))
        if len(layers) == 1:
            table[layers[0]] = value
        return value

    depth = layer / max(1, len(receiver.layers) - 1)
    candidates = relative_order(len(sender.layers), depth)[: effective_candidates(config)]
    return SELECTORS[config.selection](score, candidates, config.layers)


def _path(own: Normal, config: FitConfig) -> tuple[list[Tensor], list[float]]:
    """Maps along the relative λs: each penalty is λ times the mean diagonal of the centred Gram."""
    scale = float(own.xx.diagonal().mean()) or 1.0
    return SOLVERS[config.solver](own.xx, own.xy, [x * scale for x in config.lambdas])


def _slice(
    moments: Moments, sender: KVGeometry, group: Group, features: bool, target: Key, width: int
) -> Normal:
    """Normal equations of one group; `width` 0 means all the target's columns."""
    support: list[tuple[Key, slice | None]] = [(FEATURES, None)] if features else []
    for block in group.blocks:
        stream = sender.layers[block.layer].stream(block.stream)
        support += [
            ((block.layer, block.stream), part) for part in _parts(block.heads, stream.width)
        ]
    if not width:
        return moments.normal(support, target)
    first, last = group.heads[0], group.heads[-1]
    if list(group.heads) == list(range(first, last + 1)):
        return moments.normal(support, target, slice(first * width, (last + 1) * width))
    whole = moments.normal(support, target)
    at = torch.cat([torch.arange(h * width, (h + 1) * width) for h in group.heads]).to(
        whole.xy.device
    )
    return replace(whole, y_mean=whole.y_mean[at], xy=whole.xy[:, at], yy=whole.yy[at])


def _parts(heads: tuple[int, ...] | None, width: int) -> list[slice | None]:
    return [None] if heads is None else [slice(h * width, (h + 1) * width) for h in heads]


def _targets(receiver: KVGeometry) -> Iterator[Key]:
    for layer, geometry in enumerate(receiver.layers):
        for stream in geometry.streams:
            yield layer, stream.name


def _mean(r2: Tensor) -> float:
    """Mean over outputs that vary; −∞ where none does."""
    alive = r2[~r2.isnan()]
    return float(alive.mean()) if len(alive) else float("-inf")


def _small(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).cpu().contiguous()
