"""From a fit's moments to what leverage is measured in, before the moments are thrown away."""

from __future__ import annotations

import torch
from scipy.linalg import eigh

from kvbridge.asset.leverage import Factor
from kvbridge.asset.maps.translator import Translator
from kvbridge.fitting.moments import Moments

RANK = 64


def solve_factors(train: Moments, translator: Translator) -> dict[str, Factor]:
    """By stream: the low-rank factor of the training rows that the last receiver layer's map reads,
    whole layers of them.

    They were gathered together for that very map, so their second moments are exact. Solved on the
    CPU, where only the eigenvectors that are kept need be found. Modifies nothing.
    """
    last = max(translator.layers)
    layers_read: dict[str, tuple[int, ...]] = {}
    for layer, stream in translator.maps.reads(range(last, last + 1)):
        layers_read[stream] = (*layers_read.get(stream, ()), layer)
    return {
        stream: factor_of(train, stream, layers, (last, stream))
        for stream, layers in sorted(layers_read.items())
    }


def factor_of(
    train: Moments, stream: str, layers: tuple[int, ...], target: tuple[int, str]
) -> Factor:
    """The factor of one stream's rows over `layers`, which some map of `target` reads together.

    Eigenvectors have a sign of their own; the largest entry of each direction is made positive, so
    that the same moments give the same bytes.
    """
    normal = train.normal([((layer, stream), None) for layer in layers], target)
    covariance = normal.xx / normal.n
    scale = covariance.diagonal().clamp_min(0).sqrt().clamp_min(1e-6)
    rank = min(RANK, len(scale))
    correlation = (covariance / torch.outer(scale, scale)).cpu().numpy()
    values, vectors = eigh(correlation, subset_by_index=[len(scale) - rank, len(scale) - 1])
    directions = torch.from_numpy(vectors)
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    directions = directions * largest.sign() / torch.from_numpy(values).clamp_min(1e-6).sqrt()
    small = [t.float().cpu().contiguous() for t in (normal.x_mean, scale, directions)]
    return Factor(stream, layers, *small)
