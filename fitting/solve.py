"""Ridge from centred moments: pure functions from arrays to arrays, in one dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvbridge.errors import FitError

JITTER = (0.0, 1e-12, 1e-10, 1e-8, 1e-6)
"""Added to the unit diagonal of an equilibrated Gram that is indefinite by rounding, least first.
More than the last would be a penalty of its own, and is a refusal."""


def cholesky(
    xx: Tensor, xy: Tensor, penalties: Sequence[float]
) -> tuple[list[Tensor], list[float]]:
    """W(λ) = (XX + λI)⁻¹ XY for each absolute penalty λ.

    xx `[p, p]` and xy `[p, q]` are centred, fp64, not modified. The system is equilibrated by its
    diagonal D: D^-½ (XX + λI) D^-½ is factorised, with the least jitter of JITTER that lets it;
    jitters used are returned beside the maps `[p, q]`. Raises FitError when none does.
    """
    maps, jitters = [], []
    for penalty in penalties:
        diagonal = xx.diagonal() + penalty
        # Columns of keys, values and hidden states differ in scale by orders of magnitude. A unit
        # diagonal is close to the best any diagonal scaling does for the condition (van der Sluis
        # 1969), and makes one jitter mean the same for every column. It cancels in the result.
        scale = diagonal.clamp_min(torch.finfo(xx.dtype).tiny).rsqrt()
        system = xx * scale[:, None] * scale
        # With its penalty the diagonal is 1; a dead column without one has 0 and waits for jitter.
        system.diagonal().copy_(diagonal * scale.square())
        for jitter in JITTER:
            if jitter:
                system.diagonal().add_(jitter)
            factor, info = torch.linalg.cholesky_ex(system)
            if int(info) == 0:
                break
        else:
            raise FitError(
                f"the Gram matrix of {len(xx)} features is indefinite even with jitter "
                f"{JITTER[-1]}; use precision='float64' or a larger λ"
            )
        maps.append(torch.cholesky_solve(xy * scale[:, None], factor) * scale[:, None])
        jitters.append(jitter)
    return maps, jitters


def eigh(xx: Tensor, xy: Tensor, penalties: Sequence[float]) -> tuple[list[Tensor], list[float]]:
    """The same maps along a path of penalties from one eigendecomposition XX = QΛQᵀ: W(λ) = Q (Λ +
    λ)⁻¹ Qᵀ XY.

    Negative eigenvalues (rounding) count as zero. Jitter is never needed: zeros are returned.
    """
    values, vectors = torch.linalg.eigh(xx)
    # A Gram has no negative eigenvalues: one below zero is rounding, and would cancel a small λ.
    values = values.clamp_min(0)
    rotated = vectors.T @ xy
    maps = [vectors @ (rotated / (values + penalty)[:, None]) for penalty in penalties]
    return maps, [0.0] * len(maps)


Solver = Callable[[Tensor, Tensor, Sequence[float]], tuple[list[Tensor], list[float]]]
SOLVERS: dict[str, Solver] = {"cholesky": cholesky, "eigh": eigh}
