"""What is usual among the sender rows that a translator was fitted on: a low-rank factor of their
second moments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbridge.cache.snapshot import LayerKV


@dataclass(frozen=True, eq=False)
class Factor:
    """Of one stream's rows over sender `layers`, side by side, as the last receiver layer's map
    reads them; fp32.

    `mean`, `scale` `[features]`: of the fit's training rows. `directions` `[features, rank]`: the
    largest principal directions of the rows so standardised, each over the root of its eigenvalue.
    Projections of the training rows onto them have mean square 1, and their sum of squares is the
    leverage within that subspace, times the number of rows.
    """

    stream: str
    layers: tuple[int, ...]
    mean: Tensor
    scale: Tensor
    directions: Tensor

    def standardised(self, content: Mapping[int, LayerKV]) -> Tensor:
        """Rows `[n, features]` of content[sender layer][stream] `[n, heads, width]`."""
        rows = torch.cat([content[i][self.stream].flatten(1) for i in self.layers], dim=1)
        return (rows.to(self.mean.device).float() - self.mean) / self.scale

    def whitened(self, standardised: Tensor) -> Tensor:
        """Projections `[n, rank]` of standardised rows `[n, features]`."""
        return standardised @ self.directions

    def outside(self, standardised: Tensor, whitened: Tensor) -> float:
        """Share of standardised rows' squared length that lies in none of the directions, given
        their projections, 0 to 1; NaN where a row holds NaN or its length overflows."""
        inside = (whitened / self.directions.norm(dim=0)).square().sum()
        whole = standardised.square().sum().clamp_min(1e-12)
        # Clamps keep NaN: rows without a length must not pass for usual ones.
        return float((1 - inside / whole).clamp_min(0))
