"""Held-out scores of a translator on the test split: R² and attention-output cosine, computed from
residuals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvbridge.cache.snapshot import LayerKV
from kvbridge.geometry import KVGeometry
from kvbridge.model.attention import attend, attention_probe
from kvbridge.model.model import Model


@dataclass(frozen=True)
class Scores:
    """Test-split scores per receiver layer.

    `r2[layer, stream]` `[heads, width]`, NaN for dimensions that do not vary, never clipped;
    `attention_cosine[layer]` mean over tokens and heads; `single_layer_r2[stream]` `[receiver
    layers][sender layers]` on validation, where a selector scored them. `rows` and `documents` say
    on how much. `token_only_r2`: as `r2`, of the control that reads no sender: what a translation
    adds starts there.
    """

    r2: dict[tuple[int, str], Tensor]
    attention_cosine: list[float | None]
    rows: int
    documents: int
    single_layer_r2: dict[str, list[list[float | None]]] = field(default_factory=dict)
    token_only_r2: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def mean_r2(self, layer: int, stream: str) -> float | None:
        """Mean over dimensions that vary; None where none does."""
        return _alive_mean(self.r2[layer, stream])

    def to_json(self) -> dict[str, Any]:
        """Per layer means, per head means and per dimension values, as plain JSON types (NaN as
        null)."""
        layers = sorted({layer for layer, _ in self.r2})
        control = {
            f"{s}_r2": [_plain(_alive_mean(self.token_only_r2[i, s])) for i in layers]
            for s in ("k", "v")
            if self.token_only_r2
        }
        return {
            "split": "test",
            "rows": self.rows,
            "documents": self.documents,
            "layers": layers,
            "k_r2": [_plain(self.mean_r2(i, "k")) for i in layers],
            "v_r2": [_plain(self.mean_r2(i, "v")) for i in layers],
            "k_r2_heads": [
                [_plain(x) for x in self.r2[i, "k"].nanmean(1).tolist()] for i in layers
            ],
            "v_r2_heads": [
                [_plain(x) for x in self.r2[i, "v"].nanmean(1).tolist()] for i in layers
            ],
            "k_r2_dimensions": [
                [[_plain(x) for x in head] for head in self.r2[i, "k"].tolist()] for i in layers
            ],
            "v_r2_dimensions": [
                [[_plain(x) for x in head] for head in self.r2[i, "v"].tolist()] for i in layers
            ],
            "attention_cosine": [_plain(self.attention_cosine[i]) for i in layers],
            "single_layer_r2": {
                name: [[_plain(x) for x in row] for row in table]
                for name, table in self.single_layer_r2.items()
            },
            **({"token_only": control} if control else {}),
        }


def _alive_mean(r2: Tensor) -> float | None:
    alive = r2[~r2.isnan()]
    return float(alive.mean()) if len(alive) else None


def _plain(value: float | None) -> float | None:
    return None if value is None or value != value else float(f"{value:.6g}")


class Residuals:
    """Accumulates Σ(y − ŷ)², Σy and Σy² per dimension about the first rows' mean; `r2` reads it."""

    def __init__(self, receiver: KVGeometry) -> None:
        self.receiver = receiver
        self.rows = 0
        self._sums: dict[tuple[int, str], list[Tensor]] = {}

    def update(self, target: dict[tuple[int, str], Tensor], found: dict[int, LayerKV]) -> None:
        """Adds rows: target[layer, stream] and found[layer][stream] `[rows, heads, width]`."""
        for (layer, name), y in target.items():
            y = y.double()
            error = (y - found[layer][name].double()).square().sum(0)
            if (layer, name) not in self._sums:
                self._sums[layer, name] = [
                    y.mean(0),
                    torch.zeros_like(error),
                    torch.zeros_like(error),
                    torch.zeros_like(error),
                ]
            shift, squared, total, squares = self._sums[layer, name]
            squared += error
            total += (y - shift).sum(0)
            squares += (y - shift).square().sum(0)
        self.rows += len(next(iter(target.values())))

    def r2(self) -> dict[tuple[int, str], Tensor]:
        """1 − Σ(y − ŷ)² / Σ(y − ȳ)² per dimension `[heads, width]`, on the CPU; NaN for dead
        dimensions."""
        found = {}
        for key, (shift, squared, total, squares) in self._sums.items():
            variation = squares - total.square() / max(1, self.rows)
            alive = variation > 1e-10 * self.rows * (
                shift + total / max(1, self.rows)
            ).square().clamp_min(1e-12)
            found[key] = torch.where(
                alive, 1 - squared / variation.clamp_min(1e-300), torch.nan
            ).cpu()
        return found


@torch.no_grad()
def attention_cosine(
    receiver: Model, ids: Tensor, translated: dict[int, LayerKV], sinks: int
) -> dict[int, float]:
    """Mean cosine per layer between the receiver's attention outputs over its own cache and over
    `translated` (`[tokens, heads, width]`, rotated; the first `sinks` tokens are taken from the
    receiver), with its own queries.

    ids `[tokens]`. Tokens after the sinks and all query heads count alike.
    """
    found: dict[int, float] = {}

    def observe(
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
    ) -> None:
        if layer not in translated:
            return
        other_k, other_v = (translated[layer][n].transpose(0, 1)[None].to(key) for n in ("k", "v"))
        other_k, other_v = (
            torch.cat((own[:, :, :sinks], other[:, :, sinks:]), dim=2)
            for own, other in ((key, other_k), (value, other_v))
        )
        own = attend(query, key, value, mask, scaling)
        other = attend(query, other_k, other_v, mask, scaling)
        found[layer] = float(
            cosine_similarity(own.float(), other.float(), dim=-1)[:, :, sinks:].mean()
        )

    with attention_probe(receiver.model, observe):
        receiver.decoder(input_ids=ids[None].to(receiver.device), use_cache=False)
    return found
