"""Relative error of rows, as several signals measure it."""

from torch import Tensor


def relative(found: Tensor, expected: Tensor) -> Tensor:
    """‖found − expected‖ / ‖expected‖ per row, `[n]`, of `[n, heads, width]`."""
    error = (found.float() - expected.float()).flatten(1).norm(dim=1)
    return error / expected.float().flatten(1).norm(dim=1).clamp_min(1e-6)
