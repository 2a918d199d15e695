"""Whether rows that were given as a model's own cache are its own: recomputed where that is cheap.

Layer 0's K and V follow from a token's id and its position alone, so any of its rows can be computed
again by themselves: that tells rows that were evicted, moved, merged or quantised, and where rows
stand. The last tokens, run once more over the rows before them, tell the same of the layers above.
What neither sees: rows of the last layer before the last tokens, which nothing later is computed
from but the next token's logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbridge.cache.features import early_kv, noted
from kvbridge.cache.layers import LayerKV, build_cache
from kvbridge.cache.run import run_decoder
from kvbridge.errors import UsageError
from kvbridge.model.model import Model

SAMPLED_ROWS = 512
TAIL_TOKENS = 8
SEARCHED_POSITIONS = 8192


@dataclass(frozen=True)
class Rounding:
    """By how much a row may differ, relative to its length, and still be the model's own: `first` in
    layer 0, which is computed from the embeddings alone, `deep` in any layer, where rounding has
    gone through the layers below."""

    first: float
    deep: float


ROUNDING = {
    torch.float64: Rounding(1e-9, 1e-8),
    torch.float32: Rounding(1e-4, 2e-3),
    torch.float16: Rounding(8e-3, 5e-2),
    torch.bfloat16: Rounding(4e-2, 2e-1),
}
"""Some tens of units in the last place: a batch of another size sums in another order."""

WHAT_NEXT = (
    "give the whole, contiguous beginning as the model computed it: no evicted, cropped, merged or "
    "quantised rows, and the ids of just these tokens"
)


def sampled(count: int, most: int = SAMPLED_ROWS) -> Tensor:
    """Up to `most` rows of `count`, the first and the last among them, evenly spaced, `[n]`."""
    return torch.linspace(0, max(0, count - 1), min(most, count)).round().long().unique()


@torch.no_grad()
def row_errors(rows: Tensor, expected: Tensor) -> Tensor:
    """Length of the difference over the expected row's length, `[n]` fp32, of `[n, heads, width]`;
    infinite where a row is not finite."""
    difference = (rows.to(expected.device).float() - expected.float()).flatten(1).norm(dim=1)
    errors = difference / expected.float().flatten(1).norm(dim=1).clamp_min(1e-12)
    return torch.where(errors.isfinite(), errors, torch.inf).cpu()


def first_layer_errors(model: Model, ids: Tensor, positions: Tensor, layer: LayerKV) -> Tensor:
    """How far rows `[n, heads, width]` of layer 0 are from what the model computes for ids `[n]` at
    positions `[n]`: the larger of K and V, `[n]`."""
    own = early_kv(model, ids, positions)[0]
    return torch.maximum(row_errors(layer["k"], own["k"]), row_errors(layer["v"], own["v"]))


def find_positions(
    model: Model, ids: Tensor, layer: LayerKV, candidates: Sequence[Tensor]
) -> Tensor:
    """The positions `[tokens]` that rows of layer 0 `[tokens, heads, width]` stand at: the first of
    `candidates` under which sampled rows are the model's own, else one ascending run from wherever
    the first row stands. Raises UsageError, naming the first row that fits nowhere."""
    at = sampled(len(ids))
    some = {name: tensor[at.to(tensor.device)] for name, tensor in layer.items()}
    limit = ROUNDING[model.dtype].first
    usable = [c for c in candidates if int(c[-1]) < model.geometry.max_positions]
    best: tuple[Tensor, Tensor] | None = None
    for positions in usable:
        errors = first_layer_errors(model, ids[at], positions[at], some)
        if bool((errors <= limit).all()):
            return positions
        if best is None or int((errors <= limit).sum()) > int((best[1] <= limit).sum()):
            best = positions, errors
    first, last = (_searched(model, ids, layer, row) for row in (0, len(ids) - 1))
    if first is not None and last == first + len(ids) - 1:
        positions = torch.arange(first, first + len(ids))
        if bool((first_layer_errors(model, ids[at], positions[at], some) <= limit).all()):
            return positions
    if first is not None and last is not None and last < first + len(ids) - 1:
        raise UsageError(
            f"row 0 stands at position {first} and row {len(ids) - 1} at position {last}: expected "
            "one prompt at ascending positions, not several packed into one row; give one of them"
        )
    if best is None:
        raise UsageError(
            f"expected positions below {model.geometry.max_positions}, found "
            f"{int(candidates[0][-1])}"
        )
    positions, errors = best
    row = int((errors > limit).nonzero()[0, 0])
    raise UsageError(
        f"row {int(at[row])} (token {int(ids[at[row]])}) of layer 0 is off by {errors[row]:.1%} from "
        f"what {model.name} computes for this token at position {int(positions[at[row]])}; "
        f"{WHAT_NEXT}"
    )


def check_positions(model: Model, ids: Tensor, positions: Tensor, layer: LayerKV) -> None:
    """Raises UsageError unless sampled rows of layer 0 are the model's own at these positions."""
    at = sampled(len(ids))
    some = {name: tensor[at.to(tensor.device)] for name, tensor in layer.items()}
    errors = first_layer_errors(model, ids[at], positions[at], some)
    wrong = (errors > ROUNDING[model.dtype].first).nonzero()[:, 0]
    if len(wrong):
        row = int(wrong[0])
        raise UsageError(
            f"row {int(at[row])} (token {int(ids[at[row]])}) of layer 0 is off by {errors[row]:.1%} "
            f"from what {model.name} computes for this token at position "
            f"{int(positions[at[row]])}, as position_ids= says; {WHAT_NEXT}"
        )


@torch.no_grad()
def check_tail(model: Model, ids: Tensor, positions: Tensor, layers: Sequence[LayerKV]) -> None:
    """Runs the last tokens once more over the rows before them, and raises UsageError where a layer
    then gives other rows than `layers` hold. Rows stand at positions without holes. Costs a forward
    of TAIL_TOKENS tokens."""
    count = len(ids)
    new = min(TAIL_TOKENS, count - 1)
    if new < 1:
        return
    past = [
        {name: tensor[:-new].to(model.device) for name, tensor in layer.items()} for layer in layers
    ]
    cache = build_cache(model, past)
    arguments: dict[str, Any] = {
        "position_ids": positions[None, -new:],
        "attention_mask": torch.ones((1, count), dtype=torch.int64),
    }
    with noted(cache) as again:
        run_decoder(model, ids[None, -new:], cache=cache, **arguments)
    limit = ROUNDING[model.dtype].deep
    for index, (layer, own) in enumerate(zip(layers, again, strict=True)):
        for name, tensor in layer.items():
            errors = row_errors(tensor[-new:], own[name])
            if bool((errors > limit).any()):
                row = count - new + int((errors > limit).nonzero()[0, 0])
                raise UsageError(
                    f"row {row} of layer {index} {name} is off by {float(errors.max()):.1%} from "
                    f"what {model.name} computes over the rows before it; {WHAT_NEXT}"
                )


def _searched(model: Model, ids: Tensor, layer: LayerKV, row: int) -> int | None:
    """The position at which a row of layer 0 is the model's own; None where none is, or where its
    layer 0 does not tell positions apart."""
    most = min(model.geometry.max_positions, SEARCHED_POSITIONS)
    positions = torch.arange(most)
    own = early_kv(model, ids[row].expand(most), positions)[0]["k"]
    errors = row_errors(layer["k"][row : row + 1].expand(most, -1, -1), own)
    fitting = (errors <= ROUNDING[model.dtype].first).nonzero()[:, 0]
    if len(fitting) == 0 or len(fitting) == most:
        return None
    return int(errors.argmin())
