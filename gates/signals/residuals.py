"""Relative error of rows, as several signals measure it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbridge.snapshot import LayerKV


def relative(found: Tensor, expected: Tensor) -> Tensor:
    """‖found − expected‖ / ‖expected‖ per row, `[n]`, of `[n, heads, width]`."""
    error = (found.float() - expected.float()).flatten(1).norm(dim=1)
    return error / expected.float().flatten(1).norm(dim=1).clamp_min(1e-6)


def worst(cached: Sequence[LayerKV], rows: Tensor, again: Sequence[LayerKV]) -> float:
    """log10 of the largest relative error of `rows` `[n]` of the cached layers, against the first layers computed
    `again` `[n, heads, width]`; NaN where anything is."""
    errors = [
        relative(cached[i][name][rows].to(own.device), own)
        for i, layer in enumerate(again)
        for name, own in layer.items()
    ]
    return math.log10(float(torch.cat(errors).max()) + 1e-6)  # max keeps NaN
