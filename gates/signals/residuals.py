"""Relative error of rows, as several signals measure it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbridge.cache.snapshot import KVSnapshot, LayerKV

ROUNDING = {"float64": 2.0**-16, "float32": 2.0**-16, "float16": 2.0**-9, "bfloat16": 2.0**-6}
"""By dtype of a cache: how far a row of the first layers may be from its own computation done
another way, by `relative`. A cache grown token by token or in chunks, or on another device, is as
right as a prefilled one and differs by up to that."""


def relative(rows: Tensor, expected: Tensor) -> Tensor:
    """‖rows − expected‖ / ‖expected‖ per row, `[n]`, of `[n, heads, width]`."""
    error = (rows.float() - expected.float()).flatten(1).norm(dim=1)
    return error / expected.float().flatten(1).norm(dim=1).clamp_min(1e-6)


def worst(
    snapshot: KVSnapshot, rows: Tensor, again: Sequence[LayerKV], *, roundings: float = 1
) -> float:
    """log10 of the largest relative error of `rows` `[n]` of the snapshot's layers, against the
    first layers computed `again` `[n, heads, width]`; NaN where anything is.

    What is below `roundings` × ROUNDING counts as that much: limits set on prefilled caches, which
    are often equal bit for bit, would refuse every other honest one.
    """
    errors = []
    for index, layer in enumerate(again):
        for name, own in layer.items():
            cached = snapshot.layers[index][name][rows].to(own.device)
            errors.append(relative(cached, own))
    least = roundings * ROUNDING[snapshot.geometry.dtype]
    return math.log10(float(torch.cat(errors).max().clamp_min(least)))  # max and clamp keep NaN
