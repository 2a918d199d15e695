"""From a fit's moments to what leverage is measured in, before the moments are thrown away."""

from __future__ import annotations

import torch

from kvbridge.fitting.moments import Moments
from kvbridge.leverage import Factor
from kvbridge.translator import Translator

RANK = 64


def solve_factors(train: Moments, translator: Translator) -> dict[str, Factor]:
    """By stream: the low-rank factor of the training rows that the last receiver layer's map reads, whole layers of them.

    They were gathered together for that very map, so their second moments are exact. Modifies nothing.
    """
    last = max(translator.layers)
    found = {}
    for stream in (name for layer, name in sorted(translator.maps) if layer == last):
        groups = translator.maps[last, stream]
        layers = tuple(sorted({b.layer for g in groups for b in g.blocks}))
        found[stream] = factor_of(train, stream, layers, (last, stream))
    return found


def factor_of(train: Moments, stream: str, layers: tuple[int, ...], target: tuple[int, str]) -> Factor:
    """The factor of one stream's rows over `layers`, which some map of `target` reads together.

    Eigenvectors have a sign of their own; the largest entry of each direction is made positive, so that the same moments
    give the same bytes.
    """
    normal = train.normal([((layer, stream), None) for layer in layers], target)
    covariance = normal.xx / normal.n
    scale = covariance.diagonal().clamp_min(0).sqrt().clamp_min(1e-6)
    values, vectors = torch.linalg.eigh(covariance / torch.outer(scale, scale))
    rank = min(RANK, len(values))
    top, directions = values[-rank:].clamp_min(1e-6), vectors[:, -rank:]
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    directions = directions * largest.sign() / top.sqrt()
    small = [t.float().cpu().contiguous() for t in (normal.x_mean, scale, directions)]
    return Factor(stream, layers, *small)
