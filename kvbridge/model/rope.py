"""RoPE taken from the live model, undone and applied again.

Cached keys are `k_rot = k·cos + R(k)·sin`, with R half-split or interleaved and cos/sin already
multiplied by the model's attention scaling s (YaRN). The inverse is `k = (k_rot·cos − R(k_rot)·sin)
/ s²`; R and s are measured against the model's own pre-RoPE projection when it is loaded, never
read from a config.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvbridge.errors import RotationMismatch, UnsupportedModel
from kvbridge.geometry import digest_parts

LENGTH_DEPENDENT = ("dynamic", "longrope")
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""By the dtype of the cache: largest error of undone RoPE, in parts of the largest key. A wrong
style misses by about 1, so that the bounds need not be tight."""
DIGEST_POSITIONS = (0, 1, 7, 1000)


def _half_split(x: Tensor) -> Tensor:
    """R of RoPE that pairs dimension i with i + d/2 (Llama and most others)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _interleaved(x: Tensor) -> Tensor:
    """R of RoPE that pairs dimension 2i with 2i + 1 (GLM, Cohere; arXiv 2104.09864, eq. 34)."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


STYLES: dict[str, Callable[[Tensor], Tensor] | None] = {
    "half_split": _half_split,
    "interleaved": _interleaved,
    "none": None,
}


@dataclass(frozen=True, eq=False)
class Rotation:
    """RoPE of one model: which style each layer uses, and the module that makes its phases.

    `module` is the model's own rotary module (None: learned or no positions), `layer_types[i]` the
    argument it wants for layer i (None: it takes none), `styles[i]` a key of STYLES.
    """

    module: nn.Module | None
    layer_types: tuple[str | None, ...]
    styles: tuple[str, ...]

    def phases(self, positions: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """cos and sin `[tokens, 1, rotated dims]` in fp32 for int64 positions `[tokens]`, and s²
        `[]`.

        The module is called with an fp32 argument, so the phases are fp32 even in a bf16 model.
        """
        assert self.module is not None
        device = next(self.module.buffers()).device
        like = torch.empty(0, dtype=torch.float32, device=device)
        kind = self.layer_types[layer]
        extra = () if kind is None else (kind,)
        with torch.no_grad():
            cos, sin = self.module(like, positions.to(device, torch.int64)[None], *extra)
        cos, sin = cos[0].float(), sin[0].float()
        # A module gives each frequency once, or twice: once per half, or once per pair of
        # neighbours. Its order need not be that of the layer's own style (some models reorder
        # inside attention).
        order = self._order(extra)
        if order == "once":
            cos, sin = (torch.cat((x, x), dim=-1) for x in (cos, sin))
        half = cos.shape[-1] // 2
        if self.styles[layer] == "half_split" and order == "pairs":
            cos, sin = (torch.cat((x[:, ::2], x[:, ::2]), dim=-1) for x in (cos, sin))
        elif self.styles[layer] == "interleaved" and order != "pairs":
            cos, sin = (x[:, :half].repeat_interleave(2, dim=-1) for x in (cos, sin))
        # cos² + sin² is s² at every position and frequency; the mean in fp64 evens out rounding.
        scale_squared = (cos.double().square() + sin.double().square()).mean().float()
        return cos[:, None], sin[:, None], scale_squared

    def _order(self, extra: tuple[str, ...]) -> str:
        """How the module gives its frequencies: each `once` (gpt-oss), twice in `halves`, or twice
        in `pairs`. Seen at two positions where they differ, once per kind of layer."""
        orders: dict[tuple[str, ...], str] = vars(self).setdefault("_orders", {})
        if extra not in orders:
            assert self.module is not None
            device = next(self.module.buffers()).device
            like = torch.empty(0, dtype=torch.float32, device=device)
            with torch.no_grad():
                positions = torch.tensor([[1, 7]], device=device)
                cos, sin = (x[0].float() for x in self.module(like, positions, *extra))
            pairs = torch.equal(cos[:, ::2], cos[:, 1::2]) and torch.equal(
                sin[:, ::2], sin[:, 1::2]
            )
            twice = "pairs" if pairs else "once"
            orders[extra] = "halves" if _halves_equal(cos) and _halves_equal(sin) else twice
        return orders[extra]

    def unrotate(self, keys: Tensor, positions: Tensor, layer: int) -> Tensor:
        """Cached keys `[tokens, heads, head_dim]` to content space, fp32; the argument is not
        modified."""
        turn = STYLES[self.styles[layer]]
        if turn is None:
            return keys.float()
        cos, sin, scale_squared = (x.to(keys.device) for x in self.phases(positions, layer))
        # Partial RoPE turns the first dimensions only; the rest are cached as they were projected.
        rotated, rest = keys.float().split((cos.shape[-1], keys.shape[-1] - cos.shape[-1]), dim=-1)
        # Turning back by the same phases multiplies by s once more: rotated keys carry s already,
        # so that their content comes back only when divided by s².
        return torch.cat(((rotated * cos - turn(rotated) * sin) / scale_squared, rest), dim=-1)

    def rotate(self, keys: Tensor, positions: Tensor, layer: int) -> Tensor:
        """Content-space keys `[tokens, heads, head_dim]` to what the model caches, fp32; inverse of
        `unrotate`."""
        turn = STYLES[self.styles[layer]]
        if turn is None:
            return keys.float()
        cos, sin, _ = (x.to(keys.device) for x in self.phases(positions, layer))
        content, rest = keys.float().split((cos.shape[-1], keys.shape[-1] - cos.shape[-1]), dim=-1)
        return torch.cat((content * cos + turn(content) * sin, rest), dim=-1)

    def digest(self) -> str:
        """Digest of the styles and of the phases themselves at a few positions."""
        parts = [",".join(self.styles).encode()]
        for layer in range(len(self.styles)):
            if self.module is not None and self.styles[layer] != "none":
                cos, sin, _ = self.phases(torch.tensor(DIGEST_POSITIONS), layer)
                parts += [_rounded(cos), _rounded(sin)]
        return digest_parts(parts)


def measure_rotation(
    decoder: nn.Module, config: Any, content: list[Tensor], cached: list[Tensor], positions: Tensor
) -> Rotation:
    """The Rotation whose inverse takes `cached` back to `content`, both `[tokens, heads, head_dim]`
    per layer.

    Each layer's style is the one with the least error. Raises RotationMismatch, naming the layer
    and the error measured, where none is within tolerance, and UnsupportedModel where phases depend
    on the prompt's length.
    """
    module = getattr(decoder, "rotary_emb", None)
    kinds = getattr(module, "rope_type", "default")
    for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
        if kind in LENGTH_DEPENDENT:
            raise UnsupportedModel(
                f"RoPE of type {kind!r} changes its frequencies with the prompt's length, so "
                "cached keys cannot be moved between prompts; load the model with another rope_type"
            )
    names: list[str] = getattr(config, "layer_types", None) or []
    per_type = isinstance(kinds, dict)
    layer_types = tuple(names[i] if per_type else None for i in range(len(content)))
    # What a config says of its RoPE is not enough: some layers skip it, some models reorder it. So
    # every style is tried on every layer, and the model's own keys say which one it is.
    candidates = {
        style: Rotation(module, layer_types, (style,) * len(content))
        for style in STYLES
        if style == "none" or module is not None
    }
    styles = []
    for layer, (before, after) in enumerate(zip(content, cached, strict=True)):
        errors = {}
        known = not per_type or layer_types[layer] in kinds
        for style, rotation in candidates.items():
            if style != "none" and not known:
                # Layers of a kind without phases have no positions (Beam).
                continue
            difference = rotation.unrotate(after, positions, layer) - before.float()
            largest = before.float().abs().max().clamp_min(1e-12)
            errors[style] = float(difference.abs().max() / largest)
        style = min(errors, key=errors.__getitem__)
        allowed = TOLERANCE[after.dtype]
        # Not `>`: an error that is NaN must be refused, too.
        if not errors[style] <= allowed:
            raise RotationMismatch(
                f"layer {layer}: undoing RoPE ({style}) misses the model's own pre-RoPE keys by "
                f"{errors[style]:.2e} of their largest value (allowed {allowed:.0e}); "
                "this RoPE is not supported"
            )
        styles.append(style)
    return Rotation(module, layer_types, tuple(styles))


def _halves_equal(phases: Tensor) -> bool:
    """Whether the second half of the last axis repeats the first."""
    half = phases.shape[-1] // 2
    return torch.equal(phases[..., :half], phases[..., half:])


def _rounded(phases: Tensor) -> bytes:
    """Phases to four decimals: what devices and releases compute differently does not count."""
    return (1e4 * phases).round().to(torch.int32).cpu().numpy().tobytes()
