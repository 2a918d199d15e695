"""Held-out scores of a translator on the test split: R² and attention-output cosine, computed from
residuals."""

from __future__ import annotations

import math
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
        keys = [self.r2[layer, "k"] for layer in layers]
        values = [self.r2[layer, "v"] for layer in layers]
        body: dict[str, Any] = {
            "split": "test",
            "rows": self.rows,
            "documents": self.documents,
            "layers": layers,
            "k_r2": _plain([_alive_mean(r2) for r2 in keys]),
            "v_r2": _plain([_alive_mean(r2) for r2 in values]),
            "k_r2_heads": _plain([r2.nanmean(1).tolist() for r2 in keys]),
            "v_r2_heads": _plain([r2.nanmean(1).tolist() for r2 in values]),
            "k_r2_dimensions": _plain([r2.tolist() for r2 in keys]),
            "v_r2_dimensions": _plain([r2.tolist() for r2 in values]),
            "attention_cosine": _plain([self.attention_cosine[layer] for layer in layers]),
            "single_layer_r2": {name: _plain(t) for name, t in self.single_layer_r2.items()},
        }
        if self.token_only_r2:
            body["token_only"] = {
                f"{name}_r2": _plain([_alive_mean(self.token_only_r2[i, name]) for i in layers])
                for name in ("k", "v")
            }
        return body


def _alive_mean(r2: Tensor) -> float | None:
    alive = r2[~r2.isnan()]
    return float(alive.mean()) if len(alive) else None


def _plain(value: Any) -> Any:
    """Numbers of nested lists to six digits, as JSON has them: None for NaN."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if value is None or math.isnan(value) else float(f"{value:.6g}")


class Residuals:
    """Accumulates Σ(y − ŷ)², Σy and Σy² per dimension about the first rows' mean; `r2` reads it."""

    def __init__(self, receiver: KVGeometry) -> None:
        self.receiver = receiver
        self.rows = 0
        self._sums: dict[tuple[int, str], list[Tensor]] = {}

    def update(self, target: dict[tuple[int, str], Tensor], mapped: dict[int, LayerKV]) -> None:
        """Adds rows: target[layer, stream] and mapped[layer][stream] `[rows, heads, width]`."""
        for (layer, name), y in target.items():
            y = y.double()
            error = (y - mapped[layer][name].double()).square().sum(0)
            if (layer, name) not in self._sums:
                # About the first rows' mean, for as in moments the squares of a large mean would
                # swallow the variance that R² divides by.
                zeros = [torch.zeros_like(error) for _ in range(3)]
                self._sums[layer, name] = [y.mean(0), *zeros]
            shift, squared, total, squares = self._sums[layer, name]
            squared += error
            total += (y - shift).sum(0)
            squares += (y - shift).square().sum(0)
        self.rows += len(next(iter(target.values())))

    def r2(self) -> dict[tuple[int, str], Tensor]:
        """1 − Σ(y − ŷ)² / Σ(y − ȳ)² per dimension `[heads, width]`, on the CPU; NaN for dead
        dimensions."""
        scores = {}
        for key, (shift, squared, total, squares) in self._sums.items():
            variation = squares - total.square() / max(1, self.rows)
            mean = shift + total / max(1, self.rows)
            # What varies by less than rounding of its mean is constant: R² of it means nothing.
            alive = variation > 1e-10 * self.rows * mean.square().clamp_min(1e-12)
            r2 = 1 - squared / variation.clamp_min(1e-300)
            scores[key] = torch.where(alive, r2, torch.nan).cpu()
        return scores


@torch.no_grad()
def attention_cosine(
    receiver: Model,
    ids: Tensor,
    translated: dict[int, LayerKV],
    sinks: int,
    first: int | None = None,
) -> dict[int, float]:
    """Mean cosine per layer between the receiver's attention outputs over its own cache and over
    `translated` (`[tokens, heads, width]`, rotated; the first `sinks` tokens are taken from the
    receiver), with its own queries.

    ids `[tokens]`. Tokens from `first` on (by default those after the sinks) and all query heads
    count alike: what is attended to
    decides what an error costs, and R² of keys and values does not know it. The sinks are left out
    as a handoff recomputes them; most heads look there most, which would make any map seem good.
    """
    cosines: dict[int, float] = {}

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
        mixed = []
        for stream, own_cache in (("k", key), ("v", value)):
            mapped = translated[layer][stream].transpose(0, 1)[None].to(own_cache)
            mixed.append(torch.cat((own_cache[:, :, :sinks], mapped[:, :, sinks:]), dim=2))
        own = attend(query, key, value, mask, scaling)
        mixed_key, mixed_value = mixed
        other = attend(query, mixed_key, mixed_value, mask, scaling)
        cosine = cosine_similarity(own.float(), other.float(), dim=-1)
        cosines[layer] = float(cosine[:, :, sinks if first is None else first :].mean())

    with attention_probe(receiver.model, observe):
        receiver.decoder(input_ids=ids[None].to(receiver.device), use_cache=False)
    return cosines
