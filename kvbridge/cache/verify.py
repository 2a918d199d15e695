"""Whether rows that were given as a model's own cache are its own: recomputed where that is cheap.

Layer 0's K and V follow from a token's id and its position alone, so any of its rows can be
computed again by themselves: that tells rows that were evicted, moved, merged or quantised, and
where rows stand. Of the layers above, up to 128 tokens are run again over the given rows of the
others: their own rows are compared in every layer, the last one too, and what is wrong with the
rows they read shows in theirs. A prompt of up to 128 tokens is thereby computed once more as a
whole. What this cannot see: a row or two of a longer prompt that are not among those computed and
that nothing computed depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from kvbridge.cache.features import early_kv
from kvbridge.cache.layers import LayerKV
from kvbridge.cache.recompute import computed_rows
from kvbridge.errors import UsageError
from kvbridge.model.model import Model

FIRST_LAYER_ROWS = 512
COMPUTED_ROWS = 128
SEARCHED_POSITIONS = 8192
SMALL_ROW = 0.1
"""Rows shorter than this part of the median row are measured as if they were as long: values of a
token that attention rests on are nearly nothing, and rounding is large beside them."""


@dataclass(frozen=True)
class Rounding:
    """How far a model's own rows may be off where its forward was cut otherwise (token by token, in
    pieces, in a batch), relative to each row's length, by the `unit` of its dtype.

    Errors add up over layers like a random walk, hence the root. Measured on a model of 30 layers
    and one of 18, grown token by token, against the bound there: median row 1.3e-6 of 3.5e-4 in
    fp32, 2.3e-3 of 8.5e-3 in fp16, 2.0e-2 of 6.7e-2 in bf16. Rounding the upper layers to fp8 gives
    4e-2 from layer 1 on, and is told in each; rounding them to int8 gives 1.4e-2, which in bf16
    is as much as bf16 itself.
    """

    unit: float

    def median(self, layer: int) -> float:
        """Bound of the median row's error in `layer`."""
        return self.unit * (0.5 + 1.5 * sqrt(layer))

    def worst(self, layer: int) -> float:
        """Bound of any row's error in `layer`."""
        return 3 * self.median(layer)

    def fits(self, errors: Tensor, layer: int) -> bool:
        """Whether errors `[n]` of rows of `layer` are rounding alone."""
        middle = float(errors.median()) if len(errors) else 0.0
        return middle <= self.median(layer) and bool((errors <= self.worst(layer)).all())

    def first_wrong(self, errors: Tensor, layer: int) -> int:
        """Index of the first row that is too far off; where none is by itself, of the farthest."""
        wrong = (errors > self.worst(layer)).nonzero()[:, 0]
        return int(wrong[0]) if len(wrong) else int(errors.argmax())


CACHE_ROUNDING = {
    torch.float64: Rounding(1e-7),
    torch.float32: Rounding(4e-5),
    torch.float16: Rounding(torch.finfo(torch.float16).eps),
    torch.bfloat16: Rounding(torch.finfo(torch.bfloat16).eps),
}
"""fp32 is given far more than its own rounding: matrix products may be computed in TF32's order.
fp64 models take the softmax in fp32."""

WHAT_NEXT = (
    "give the whole, contiguous beginning as the model computed it: no evicted, cropped, merged or "
    "quantised rows, and the ids of just these tokens"
)


def sampled(count: int, most: int = FIRST_LAYER_ROWS) -> Tensor:
    """Up to `most` rows of `count`, the first and the last among them, evenly spaced, `[n]`."""
    return torch.linspace(0, max(0, count - 1), min(most, count)).round().long().unique()


@torch.no_grad()
def row_errors(rows: Tensor, expected: Tensor) -> Tensor:
    """Length of the difference over the expected row's length, `[n]` fp32, of `[n, heads, width]`;
    infinite where a row is not finite."""
    difference = (rows.to(expected.device).float() - expected.float()).flatten(1).norm(dim=1)
    lengths = expected.float().flatten(1).norm(dim=1)
    errors = difference / lengths.clamp_min(float(SMALL_ROW * lengths.median())).clamp_min(1e-12)
    return torch.where(errors.isfinite(), errors, torch.inf).cpu()


def first_layer_errors(model: Model, ids: Tensor, positions: Tensor, layer: LayerKV) -> Tensor:
    """How far rows `[n, heads, width]` of layer 0 are from what the model computes for ids `[n]` at
    positions `[n]`: the larger of K and V, `[n]`."""
    own = early_kv(model, ids, positions)[0]
    return torch.maximum(row_errors(layer["k"], own["k"]), row_errors(layer["v"], own["v"]))


def find_positions(
    model: Model, ids: Tensor, layers: Sequence[LayerKV], candidates: Sequence[Tensor]
) -> Tensor:
    """The positions `[tokens]` at which rows `[tokens, heads, width]` of all layers are the model's
    own: the first of `candidates` that fits, else one ascending run from wherever the first row
    stands. Raises UsageError, naming the first row that fits nowhere.

    Candidates that layer 0 cannot tell apart (it may have no RoPE) are told apart by the others.
    """
    at = sampled(len(ids))
    some = {name: tensor[at.to(tensor.device)] for name, tensor in layers[0].items()}
    rounding = CACHE_ROUNDING[model.dtype]
    usable = [c for c in candidates if int(c[-1]) < model.geometry.max_positions]
    if not usable:
        raise UsageError(
            f"expected positions below {model.geometry.max_positions}, found "
            f"{int(candidates[0][-1])}"
        )
    refusals: list[str] = []
    tried: list[tuple[Tensor, Tensor]] = []
    for positions in usable:
        if any(torch.equal(positions, before) for before, _ in tried):
            continue
        errors = first_layer_errors(model, ids[at], positions[at], some)
        tried.append((positions, errors))
        if rounding.fits(errors, 0):
            refusal = _upper_layers_differ(model, ids, positions, layers)
            if refusal is None:
                return positions
            refusals.append(refusal)
    if refusals:
        raise UsageError(refusals[0])
    first, last = (_searched(model, ids, layers[0], row) for row in (0, len(ids) - 1))
    if first is not None and last is not None:
        run = torch.arange(first, first + len(ids))
        if last == int(run[-1]):
            check_positions(model, ids, run, layers)
            return run
        if last < int(run[-1]):
            raise UsageError(
                f"row 0 stands at position {first} and row {len(ids) - 1} at position {last}: "
                "expected one prompt at ascending positions, not several packed into one row; give "
                "one of them"
            )
    positions, errors = max(tried, key=lambda pair: int((pair[1] <= rounding.worst(0)).sum()))
    raise UsageError(_first_layer_differs(model, ids, at, positions, errors))


def check_positions(
    model: Model, ids: Tensor, positions: Tensor, layers: Sequence[LayerKV]
) -> None:
    """Raises UsageError unless rows of all layers are the model's own at these positions."""
    at = sampled(len(ids))
    some = {name: tensor[at.to(tensor.device)] for name, tensor in layers[0].items()}
    errors = first_layer_errors(model, ids[at], positions[at], some)
    if not CACHE_ROUNDING[model.dtype].fits(errors, 0):
        raise UsageError(_first_layer_differs(model, ids, at, positions, errors))
    refusal = _upper_layers_differ(model, ids, positions, layers)
    if refusal is not None:
        raise UsageError(refusal)


def _upper_layers_differ(
    model: Model, ids: Tensor, positions: Tensor, layers: Sequence[LayerKV]
) -> str | None:
    """What is wrong with rows of the layers above 0, in a sentence; None where they are the model's
    own over each other. Costs a forward of up to COMPUTED_ROWS tokens."""
    chosen = sampled(len(ids), COMPUTED_ROWS)
    computed, _ = computed_rows(model, ids, layers, chosen, positions=positions)
    rounding = CACHE_ROUNDING[model.dtype]
    for index, (layer, own) in enumerate(zip(layers, computed, strict=True)):
        for name, tensor in layer.items():
            errors = row_errors(tensor[chosen.to(tensor.device)], own[name])
            if not rounding.fits(errors, index):
                which = rounding.first_wrong(errors, index)
                return (
                    f"row {int(chosen[which])} of layer {index} {name} is off by "
                    f"{float(errors[which]):.1%} from what {model.name} computes over the rows "
                    f"before it; {WHAT_NEXT}"
                )
    return None


def _first_layer_differs(
    model: Model, ids: Tensor, at: Tensor, positions: Tensor, errors: Tensor
) -> str:
    which = CACHE_ROUNDING[model.dtype].first_wrong(errors, 0)
    row = int(at[which])
    return (
        f"row {row} (token {int(ids[row])}) of layer 0 is off by {float(errors[which]):.1%} from "
        f"what {model.name} computes for this token at position {int(positions[row])}; {WHAT_NEXT}"
    )


def _searched(model: Model, ids: Tensor, layer: LayerKV, row: int) -> int | None:
    """The position at which a row of layer 0 is the model's own; None where none is, or where its
    layer 0 does not tell positions apart."""
    most = min(model.geometry.max_positions, SEARCHED_POSITIONS)
    positions = torch.arange(most)
    own = early_kv(model, ids[row].expand(most), positions)[0]["k"]
    errors = row_errors(layer["k"][row : row + 1].expand(most, -1, -1), own)
    fitting = int((errors <= CACHE_ROUNDING[model.dtype].worst(0)).sum())
    if fitting in (0, most):
        return None
    return int(errors.argmin())
