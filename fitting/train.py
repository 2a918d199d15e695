"""From moments to maps: support, λ and weights of every receiver layer and stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvbridge.asset.maps.base import Block
from kvbridge.asset.maps.dense import DenseMaps, Group, tensor_names
from kvbridge.asset.maps.translator import Translator
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.families import FAMILIES
from kvbridge.fitting.layout import FEATURES, Key
from kvbridge.fitting.memory import control_features, effective_candidates
from kvbridge.fitting.moments import Moments, Normal
from kvbridge.fitting.select import SELECTORS, relative_order
from kvbridge.fitting.solve import SOLVERS
from kvbridge.geometry import KVGeometry

SELECTION_LAMBDA = 1e-3


@dataclass(frozen=True, eq=False)
class MapSet:
    """A translator with the λ and jitter of each map (`"{layer}.{stream}"`), whether rows were too
    few, and the single-layer validation R² a selector computed, `[receiver layers][sender layers]`
    per stream."""

    translator: Translator
    lambdas: dict[str, float]
    jitter: dict[str, float]
    starved: bool = False
    single_layer_r2: dict[str, list[list[float | None]]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Problem:
    """What maps are solved from: both geometries, moments of two splits, the configuration."""

    sender: KVGeometry
    receiver: KVGeometry
    train: Moments
    validation: Moments
    config: FitConfig

    def targets(self) -> Iterator[Key]:
        """Every receiver layer and stream."""
        for layer, geometry in enumerate(self.receiver.layers):
            for stream in geometry.streams:
                yield layer, stream.name

    def heads(self, target: Key) -> tuple[int, ...]:
        """All heads of a target."""
        return tuple(range(self.receiver.layers[target[0]].stream(target[1]).heads))

    def normal(self, moments: Moments, group: Group, target: Key, *, features: bool) -> Normal:
        """The normal equations of one group: its inputs, and the columns of its heads alone."""
        inputs: list[tuple[Key, slice | None]] = [(FEATURES, None)] if features else []
        for block in group.blocks:
            width = self.sender.layers[block.layer].stream(block.stream).width
            key = (block.layer, block.stream)
            if block.heads is None:
                inputs.append((key, None))
            else:
                inputs += [(key, _columns(head, head, width)) for head in block.heads]
        if group.heads == self.heads(target):
            return moments.normal(inputs, target)
        width = self.receiver.layers[target[0]].stream(target[1]).width
        first, last = group.heads[0], group.heads[-1]
        if group.heads == tuple(range(first, last + 1)):
            return moments.normal(inputs, target, _columns(first, last, width))
        # Heads that do not follow one another are no slice. X'X is the same for all of them, so the
        # whole target's equations are made once and only columns of Y are picked.
        whole = moments.normal(inputs, target)
        columns = [torch.arange(head * width, (head + 1) * width) for head in group.heads]
        at = torch.cat(columns).to(whole.xy.device)
        return replace(whole, y_mean=whole.y_mean[at], xy=whole.xy[:, at], yy=whole.yy[at])


@dataclass(frozen=True, eq=False)
class Solved:
    """Maps of one target, group by group: W `[inputs, heads·width]` and b `[heads·width]`."""

    groups: tuple[Group, ...]
    weights: tuple[tuple[Tensor, Tensor], ...]
    penalty: float
    jitter: float


def solve_maps(
    sender: KVGeometry, receiver: KVGeometry, train: Moments, validation: Moments, config: FitConfig
) -> MapSet:
    """Solves every (receiver layer, stream): support by the configured selector, λ on validation.
    Modifies nothing."""
    problem = Problem(sender, receiver, train, validation, config)
    family, features = FAMILIES[config.family], config.receiver_features != "none"
    solved: dict[Key, Solved] = {}
    singles: dict[str, list[list[float | None]]] = {}
    for layer, stream in problem.targets():
        support, single_scores = _support(problem, (layer, stream))
        groups = family(sender, receiver, layer, stream, support)
        solved[layer, stream] = solve_groups(problem, (layer, stream), groups, features=features)
        if single_scores:
            table = singles.setdefault(
                stream, [[None] * len(sender.layers) for _ in receiver.layers]
            )
            for source, r2 in single_scores.items():
                table[layer][source] = r2
    maps = _map_set(problem, solved, config.family, config.receiver_features)
    # On fewer rows than twice its inputs a ridge fits noise: such an asset carries a mark.
    starved = train.n < 2 * largest_map(sender, receiver, config)
    return replace(maps, starved=starved, single_layer_r2=singles)


def solve_controls(
    sender: KVGeometry, receiver: KVGeometry, train: Moments, validation: Moments, config: FitConfig
) -> MapSet:
    """The token-only control: the same receiver features (embeddings where the map has none), no
    sender block."""
    problem = Problem(sender, receiver, train, validation, config)
    solved = {}
    for target in problem.targets():
        alone = (Group(problem.heads(target), ()),)
        solved[target] = solve_groups(problem, target, alone, features=True)
    return _map_set(problem, solved, "token-only", control_features(config.receiver_features))


def _map_set(
    problem: Problem, solved: dict[Key, Solved], family: str, receiver_features: str
) -> MapSet:
    """Solved targets as one translator of dense maps."""
    groups = {target: one.groups for target, one in solved.items()}
    tensors: dict[str, Tensor] = {}
    for (layer, stream), one in solved.items():
        names = tensor_names(layer, stream, len(one.groups))
        for (w, b), (weight, bias) in zip(names, one.weights, strict=True):
            tensors[w], tensors[b] = weight, bias
    features = receiver_features != "none"
    maps = DenseMaps(problem.sender, problem.receiver, features, groups)
    return MapSet(
        Translator(family, receiver_features, maps, tensors),
        {f"{layer}.{stream}": one.penalty for (layer, stream), one in solved.items()},
        {f"{layer}.{stream}": one.jitter for (layer, stream), one in solved.items()},
    )


def solve_groups(
    problem: Problem, target: Key, groups: tuple[Group, ...], *, features: bool
) -> Solved:
    """Maps of one target's groups at the λ with the best mean validation R² over all outputs."""
    config = problem.config
    fitted = [problem.normal(problem.train, g, target, features=features) for g in groups]
    held = [problem.normal(problem.validation, g, target, features=features) for g in groups]
    paths = [_path(own, config) for own in fitted]
    scores = []
    for index in range(len(config.lambdas)):
        # The bias is that of the training means: validation rows choose λ and give nothing else.
        r2 = [
            validation.r2(maps[index], own.bias(maps[index]))
            for own, validation, (maps, _) in zip(fitted, held, paths, strict=True)
        ]
        scores.append(_mean(torch.cat(r2)))
    # One λ for all groups of a target: what is reported and kept is one number per target. Of
    # equal scores the larger λ wins, since it predicts as well with smaller weights.
    best = max(range(len(scores)), key=lambda index: (scores[index], config.lambdas[index]))
    dtype = getattr(torch, config.weights_dtype)
    weights = []
    for own, (maps, _) in zip(fitted, paths, strict=True):
        # The bias is made from W before rounding: it carries the means exactly as they were.
        weights.append((_small(maps[best], dtype), _small(own.bias(maps[best]), dtype)))
    jitter = max(jitters[best] for _, jitters in paths)
    return Solved(groups, tuple(weights), config.lambdas[best], jitter)


def largest_map(sender: KVGeometry, receiver: KVGeometry, config: FitConfig) -> int:
    """Inputs of the widest map the configuration will solve."""
    support = tuple(range(min(config.layers, len(sender.layers))))
    widest = 0
    for layer, geometry in enumerate(receiver.layers):
        for stream in geometry.streams:
            for group in FAMILIES[config.family](sender, receiver, layer, stream.name, support):
                widest = max(widest, sum(block.width(sender) for block in group.blocks))
    return widest + (receiver.hidden_size if config.receiver_features != "none" else 0)


def _support(problem: Problem, target: Key) -> tuple[tuple[int, ...], dict[int, float]]:
    """Sender layers for one target, and the validation R² of each that was scored by itself."""
    layer, stream = target
    sender, config = problem.sender, problem.config
    # Candidates are compared at one λ: only their order matters here, and a search for each would
    # cost a solve per λ.
    probe = replace(config, lambdas=(SELECTION_LAMBDA,))
    single_scores: dict[int, float] = {}

    def score(layers: tuple[int, ...]) -> float:
        group = Group(problem.heads(target), tuple(Block(i, stream) for i in layers))
        own = problem.normal(problem.train, group, target, features=False)
        held = problem.normal(problem.validation, group, target, features=False)
        weights = _path(own, probe)[0][0]
        r2 = _mean(held.r2(weights, own.bias(weights)))
        if len(layers) == 1:
            single_scores[layers[0]] = r2
        return r2

    depth = layer / max(1, len(problem.receiver.layers) - 1)
    candidates = relative_order(len(sender.layers), depth)[: effective_candidates(config)]
    return SELECTORS[config.selection](score, candidates, config.layers), single_scores


def _path(own: Normal, config: FitConfig) -> tuple[list[Tensor], list[float]]:
    """Maps along the relative λs, and the jitter that each needed."""
    # λ is relative to the mean diagonal of the centred Gram, so that neither the units of the cache
    # nor the number of rows alter what it means. A Gram of zeros has no scale: any penalty does.
    scale = float(own.xx.diagonal().mean()) or 1.0
    return SOLVERS[config.solver](own.xx, own.xy, [x * scale for x in config.lambdas])


def _columns(first: int, last: int, width: int) -> slice:
    return slice(first * width, (last + 1) * width)


def _mean(r2: Tensor) -> float:
    """Mean over outputs that vary; −∞ where none does."""
    alive = r2[~r2.isnan()]
    return float(alive.mean()) if len(alive) else float("-inf")


def _small(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).cpu().contiguous()
