"""What signals need beside the models and the asset: the corpus' centre, residuals, and two maps
from disjoint layers.

`Gathering` is filled request by request (fp64), `Extras` is its frozen result and what a
calibration stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbridge.asset.leverage import Factor
from kvbridge.cache.snapshot import LayerKV
from kvbridge.errors import DataError
from kvbridge.geometry import KVGeometry
from kvbridge.handoff.evidence import Evidence

HALF_LAYERS, HALF_TARGETS = 4, 2
LEAST_ROWS = 128
RIDGE = 1e-2


@dataclass(frozen=True, eq=False)
class Extras:
    """Fitted numbers, all fp32. `centre`: stream → mean `[rank]` of the corpus' rows, whitened by
    the asset's factor of that stream; `residual_k` layer → second moment `[heads, width, width]` of
    keys as cached, translated minus the receiver's own; `residual_v` layer → mean square `[heads]`
    of values, summed over the width; `halves`: W `[inputs + 1, outputs]` of two maps to the values
    of `targets`, from `half_layers[0]` and `half_layers[1]`.
    """

    centre: Mapping[str, Tensor] = field(default_factory=dict)
    residual_k: Mapping[int, Tensor] = field(default_factory=dict)
    residual_v: Mapping[int, Tensor] = field(default_factory=dict)
    half_layers: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    targets: tuple[int, ...] = ()
    halves: tuple[Tensor, ...] = ()

    @property
    def halves_parameters(self) -> int:
        """Multiply-adds of one row through both maps."""
        return sum(w.numel() for w in self.halves)


def half_layers(sender: KVGeometry) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Even and odd sender layers, up to HALF_LAYERS of each: disjoint."""
    layers = list(range(len(sender.layers)))
    return _spread(layers[0::2], HALF_LAYERS), _spread(layers[1::2], HALF_LAYERS)


def _spread(layers: list[int], count: int) -> tuple[int, ...]:
    if len(layers) <= count:
        return tuple(layers)
    return tuple(layers[round((i + 1) * (len(layers) - 1) / count)] for i in range(count))


def rows_of(content: Mapping[int, LayerKV], layers: tuple[int, ...]) -> Tensor:
    """Sender rows side by side, `[n, features]`."""
    return torch.cat([content[i][name].flatten(1) for i in layers for name in ("k", "v")], dim=1)


class Gathering:
    """Centres of whitened sender rows, second moments of residuals, and the normal equations of
    both halves; `solve` gives Extras. Rows of training texts are not among these: residuals there
    are smaller than on new text."""

    def __init__(
        self, sender: KVGeometry, receiver: KVGeometry, factors: Mapping[str, Factor]
    ) -> None:
        self.factors, self.half_layers = factors, half_layers(sender)
        count = len(receiver.layers)
        self.targets = tuple(range(max(0, count - HALF_TARGETS), count))
        self.rows = 0
        # Sums run over thousands of rows of values of one sign, so everything is added in fp64.
        self._centre = {
            stream: torch.zeros(factor.directions.shape[1], dtype=torch.float64)
            for stream, factor in factors.items()
        }
        self._normal: list[tuple[Tensor, Tensor]] = []
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def update(self, evidence: Evidence, native: list[LayerKV], rows: Tensor) -> None:
        """Adds one request: translated receiver tokens `rows` `[n]` of the prompt,
        `native[layer][stream]` the receiver's own cache of it. Nothing given is modified."""
        content = self._content(evidence, rows)
        for stream, factor in self.factors.items():
            whitened = factor.whitened(factor.standardised(content))
            self._centre[stream] += whitened.double().sum(0)
        self.rows += len(rows)
        self._add_halves(content, native, rows)
        for layer in range(evidence.exact_layers, len(native)):
            self._add_residuals(layer, evidence.translated[layer], native[layer], rows)

    def _content(self, evidence: Evidence, rows: Tensor) -> dict[int, LayerKV]:
        """The sender's rows that receiver tokens `rows` read, of every layer that is needed."""
        wanted = {*self.half_layers[0], *self.half_layers[1]}
        for factor in self.factors.values():
            wanted |= set(factor.layers)
        index, rotation = evidence.alignment.index[rows], evidence.sender.rotation
        return {i: evidence.snapshot.content(rotation, index, i) for i in sorted(wanted)}

    def _add_halves(
        self, content: Mapping[int, LayerKV], native: list[LayerKV], rows: Tensor
    ) -> None:
        values = [native[i]["v"][rows].flatten(1) for i in self.targets]
        y = torch.cat(values, dim=1).double().cpu()
        ones = torch.ones((len(rows), 1), dtype=torch.float64)
        for number, layers in enumerate(self.half_layers):
            if not layers:
                continue
            x = torch.cat((rows_of(content, layers).double().cpu(), ones), 1)
            products = x.T @ x, x.T @ y
            if number == len(self._normal):
                self._normal.append(products)
            else:
                for total, more in zip(self._normal[number], products, strict=True):
                    total += more

    def _add_residuals(
        self, layer: int, translated: LayerKV, native: LayerKV, rows: Tensor
    ) -> None:
        k, v = ((translated[n][rows] - native[n][rows]).double().cpu() for n in ("k", "v"))
        # Not centred: what an attention output feels is the error itself, its mean included.
        # Of keys the whole matrix, for a query weighs directions; of values the trace is enough.
        keys, values = torch.einsum("nhw,nhx->hwx", k, k), v.square().sum((0, 2))
        self._keys[layer] = self._keys.get(layer, torch.zeros_like(keys)) + keys
        self._values[layer] = self._values.get(layer, torch.zeros_like(values)) + values

    def solve(self) -> Extras:
        """Raises DataError with too few rows, and for numbers that are not finite."""
        if self.rows < LEAST_ROWS:
            raise DataError(
                f"expected at least {LEAST_ROWS} sampled tokens for the gate's statistics, "
                f"found {self.rows}"
            )
        halves = [_ridge(gram, cross) for gram, cross in self._normal]
        centre = {stream: (total / self.rows).float() for stream, total in self._centre.items()}
        keys = {layer: (total / self.rows).float() for layer, total in self._keys.items()}
        values = {layer: (total / self.rows).float() for layer, total in self._values.items()}
        _check_finite("sender rows in the asset's leverage factors", centre.values())
        _check_finite("errors of the translation", (*keys.values(), *values.values()))
        _check_finite("maps from halves of the sender's layers", halves)
        if len(halves) < 2:
            return Extras(centre, keys, values)
        return Extras(centre, keys, values, self.half_layers, self.targets, tuple(halves))


def _ridge(gram: Tensor, cross: Tensor) -> Tensor:
    """W `[inputs + 1, outputs]` = (XᵀX + λI)⁻¹ XᵀY, λ relative to the mean of XᵀX's diagonal; the
    last input is the constant 1."""
    damping = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    # The constant is not shrunk: a bias would be pulled to 0, not to the mean of what is mapped.
    damping[-1, -1] = 0.0
    return torch.linalg.solve(gram + damping, cross).float()


def _check_finite(what: str, tensors: Iterable[Tensor]) -> None:
    if not all(bool(torch.isfinite(t).all()) for t in tensors):
        raise DataError(f"expected finite statistics of the gate, found NaN or infinity in {what}")
