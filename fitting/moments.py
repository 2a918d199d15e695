"""One-pass sufficient statistics of a ridge regression: gathered in blocks, merged, sliced into
normal equations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvbridge.errors import UsageError
from kvbridge.fitting.layout import Key, Layout


@dataclass(frozen=True)
class Normal:
    """Centred normal equations of one regression, fp64: n rows, means `[p]` and `[q]`, XX `[p, p]`,
    XY `[p, q]`, and the diagonal of YY `[q]`."""

    n: int
    x_mean: Tensor
    y_mean: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor

    def bias(self, weights: Tensor) -> Tensor:
        """b = ȳ − x̄ W, `[q]`."""
        return self.y_mean - self.x_mean @ weights

    def squared_error(self, weights: Tensor, bias: Tensor) -> Tensor:
        """Σ (y − xW − b)² per output `[q]`, over these rows, for any W `[p, q]` and b `[q]`."""
        # ‖y − xW‖² = yy − 2 w·xy + w·XX w, column by column: held-out rows are never needed again,
        # and the diagonal of WᵀXX W is taken without the whole of it.
        residual = self.yy - 2 * (weights * self.xy).sum(0) + (weights * (self.xx @ weights)).sum(0)
        # A bias that is not these rows' own misses their mean by the same in every row.
        return residual + self.n * (self.bias(weights) - bias).square()

    def r2(self, weights: Tensor, bias: Tensor) -> Tensor:
        """1 − squared error / YY per output `[q]`; NaN where the output does not vary."""
        # Relative to the mean: of a constant output centring leaves only rounding, not a variance.
        rounding = 1e-12 * self.n * self.y_mean.square().clamp_min(1e-12)
        total = torch.where(self.yy > rounding, self.yy, torch.nan)
        return 1 - self.squared_error(weights, bias) / total


class Moments:
    """n, means and centred XX, XY, diag YY over the blocks of a Layout.

    Products are taken about a shift (the mean of the first rows) in `precision` and accumulated in
    fp64, so nothing cancels that matters; symmetric products are taken once. Mutable; `update` and
    `merge` modify it. Formulas of the shifted sums: Chan, Golub & LeVeque, "Algorithms for
    computing the sample variance" (1983).
    """

    def __init__(
        self, layout: Layout, *, device: torch.device | str = "cpu", precision: str = "float64"
    ) -> None:
        self.layout, self.device = layout, torch.device(device)
        self.precision = getattr(torch, precision)
        new = partial(torch.zeros, dtype=torch.float64, device=self.device)
        width, out = dict(layout.inputs), dict(layout.targets)
        self.n = 0
        self._xx = {k: new(width[k], sum(width[p] for p in layout.partners[k])) for k in width}
        self._xy = {k: new(width[k], sum(out[t] for t in layout.serves[k])) for k in width}
        self._yy = new(sum(out.values()))
        self._x_shift, self._y_shift = new(sum(width.values())), new(sum(out.values()))
        self._x_sum, self._y_sum = torch.zeros_like(self._x_shift), torch.zeros_like(self._y_shift)

    @property
    def x_mean(self) -> Tensor:
        """Means of the input columns, fp64 `[inputs]`."""
        return self._x_shift + self._x_sum / max(1, self.n)

    @property
    def y_mean(self) -> Tensor:
        """Means of the target columns, fp64 `[targets]`."""
        return self._y_shift + self._y_sum / max(1, self.n)

    def update(self, x: Tensor, y: Tensor) -> None:
        """Adds rows x `[rows, inputs]`, y `[rows, targets]` in the layout's order; the arguments
        are not modified."""
        if x.shape != (len(y), len(self._x_shift)) or y.shape[1] != len(self._y_shift):
            raise UsageError(
                f"expected rows [n, {len(self._x_shift)}] and [n, {len(self._y_shift)}], "
                f"found {tuple(x.shape)} and {tuple(y.shape)}"
            )
        if len(x) == 0:
            return
        x, y = x.to(self.device), y.to(self.device)
        if self.n == 0:
            # Keys and hidden states have means many times their spread: products about zero would
            # lose the spread to rounding. Any fixed shift near the mean will do.
            self._x_shift, self._y_shift = x.double().mean(0), y.double().mean(0)
            if self.precision is not torch.float64:
                # fp32 subtraction rounds the shift: what is really subtracted is what the sums
                # must be about.
                self._x_shift = self._x_shift.float().double()
                self._y_shift = self._y_shift.float().double()
        x, y = self._about(x, self._x_shift), self._about(y, self._y_shift)
        at, to = self.layout.input_at, self.layout.target_at
        for key, where in at.items():
            left = x[:, where].T
            partners = _columns(x, [at[p] for p in self.layout.partners[key]])
            # One batch's products are short sums; it is their sum over batches that needs fp64.
            self._xx[key] += (left @ partners).double()
            if self.layout.serves[key]:
                served = _columns(y, [to[t] for t in self.layout.serves[key]])
                self._xy[key] += (left @ served).double()
        self._yy += y.double().square().sum(0)
        self._x_sum += x.double().sum(0)
        self._y_sum += y.double().sum(0)
        self.n += len(x)

    def _about(self, rows: Tensor, shift: Tensor) -> Tensor:
        """Rows less the shift, in the precision of products."""
        if self.precision is torch.float64:
            return rows.double() - shift
        return rows.float() - shift.float()

    def merge(self, other: Moments) -> None:
        """Adds another's rows to these (same layout); `other` is not modified.

        Its sums are moved to this shift: with d = their shift less this one, n rows and column sums
        s about theirs, Σ (x + d)(y + e)ᵀ = XY + d (s_y + n e)ᵀ + s_x eᵀ.
        """
        if other.layout != self.layout:
            raise UsageError("expected moments of the same layout")
        if other.n == 0:
            return
        if self.n == 0:
            self._x_shift, self._y_shift = other._x_shift.clone(), other._y_shift.clone()
        dx, dy = other._x_shift - self._x_shift, other._y_shift - self._y_shift
        at, to = self.layout.input_at, self.layout.target_at
        for key, where in at.items():
            left, left_sum = dx[where], other._x_sum[where]
            partners = [at[p] for p in self.layout.partners[key]]
            served = [to[t] for t in self.layout.serves[key]]
            for products, added, shift, total, columns in (
                (self._xx, other._xx, dx, other._x_sum, partners),
                (self._xy, other._xy, dy, other._y_sum, served),
            ):
                right = _columns(shift[None], columns)[0]
                right_sum = _columns(total[None], columns)[0]
                moved = left[:, None] * (right_sum + other.n * right) + left_sum[:, None] * right
                products[key] += added[key] + moved
        self._yy += other._yy + dy * (2 * other._y_sum + other.n * dy)
        self._x_sum += other._x_sum + other.n * dx
        self._y_sum += other._y_sum + other.n * dy
        self.n += other.n

    def normal(
        self, support: Sequence[tuple[Key, slice | None]], target: Key, columns: slice | None = None
    ) -> Normal:
        """Normal equations of `target` on input blocks, or of some columns of either.

        `support` and `target` name blocks, the slices columns within them. Centred about the means
        of all rows, so that no intercept enters the penalty: a ridge on uncentred columns would
        shrink the mean with the slopes. Nothing is modified. Raises UsageError for pairs of blocks
        that the layout does not gather, and for moments without rows.
        """
        if self.n == 0:
            raise UsageError("there are no rows yet")
        at, to = self.layout.input_at, self.layout.target_at
        within = [_inner(at[key], part) for key, part in support]
        out = _inner(to[target], columns)
        grams = []
        for key, part in support:
            row = [self._gram(key, part, other, other_part) for other, other_part in support]
            grams.append(torch.cat(row, dim=1))
        xx = torch.cat(grams, dim=0)
        xy = torch.cat([self._cross(key, part, target, columns) for key, part in support], dim=0)
        dx = torch.cat([self._x_sum[w] for w in within]) / self.n
        dy = self._y_sum[out] / self.n
        x_mean = torch.cat([self._x_shift[w] for w in within]) + dx
        # From about the shift to about the mean: Σ (x − x̄)(y − ȳ)ᵀ = Σ xyᵀ − n dx dyᵀ.
        xx -= self.n * torch.outer(dx, dx)
        xy -= self.n * torch.outer(dx, dy)
        # A square that rounding has made negative would turn R² of a constant output upside down.
        yy = (self._yy[out] - self.n * dy.square()).clamp_min(0)
        return Normal(self.n, x_mean, self._y_shift[out] + dy, xx, xy, yy)

    def _gram(self, a: Key, part_a: slice | None, b: Key, part_b: slice | None) -> Tensor:
        """Products of some columns of two input blocks about the shift; a view, do not modify."""
        if b not in self.layout.partners[a]:
            if a not in self.layout.partners[b]:
                raise UsageError(f"blocks {a} and {b} were not gathered together")
            return self._gram(b, part_b, a, part_a).T
        offset = _position(self.layout.partners[a], b, dict(self.layout.inputs))
        return self._xx[a][part_a or slice(None), _inner(offset, part_b)]

    def _cross(self, key: Key, part: slice | None, target: Key, columns: slice | None) -> Tensor:
        """Products of some columns of an input block and of a target; a view, do not modify."""
        if target not in self.layout.serves[key]:
            raise UsageError(f"block {key} was not gathered with target {target}")
        offset = _position(self.layout.serves[key], target, dict(self.layout.targets))
        return self._xy[key][part or slice(None), _inner(offset, columns)]


def _position(keys: tuple[Key, ...], wanted: Key, widths: dict[Key, int]) -> slice:
    """Columns of one block among blocks side by side."""
    start = 0
    for key in keys:
        if key == wanted:
            break
        start += widths[key]
    return slice(start, start + widths[wanted])


def _inner(outer: slice, part: slice | None) -> slice:
    return outer if part is None else slice(outer.start + part.start, outer.start + part.stop)


def _columns(tensor: Tensor, where: list[slice]) -> Tensor:
    """Columns of several slices side by side; a view where they follow one another."""
    if not where:
        return tensor[:, :0]
    if all(a.stop == b.start for a, b in itertools.pairwise(where)):
        return tensor[:, where[0].start : where[-1].stop]
    return torch.cat([tensor[:, w] for w in where], dim=1)
