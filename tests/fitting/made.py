"""Made-up geometries, rows and moments whose truth is known; no model is needed."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from kvbridge.fitting.layout import Layout, make_layout
from kvbridge.fitting.moments import Moments
from kvbridge.geometry import KVGeometry, LayerGeometry, Stream, digest_text


def make_geometry(
    name: str, layers: int = 3, heads: int = 2, width: int = 4, hidden: int = 5
) -> KVGeometry:
    """A geometry of `layers` equal layers that belongs to no model."""
    streams = (Stream("k", heads, width, True), Stream("v", heads, width, False))
    return KVGeometry(
        model_id=name,
        commit="",
        architecture="Made",
        dtype="float32",
        hidden_size=hidden,
        attention_heads=heads,
        max_positions=512,
        vocabulary=300,
        parameters=1000,
        layer_parameters=900,
        layers=tuple(
            LayerGeometry("full", streams, None, digest_text(f"{name} {i}")) for i in range(layers)
        ),
        tokenizer_digest=digest_text("tokenizer"),
        rope_digest=digest_text("rope"),
        config_digest=digest_text("config"),
        embedding_digest=digest_text(f"{name} embedding"),
        weights_digest=digest_text(f"{name} weights"),
    )


def rows_for(
    layout: Layout, rows: int, seed: int = 0, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Correlated rows x `[rows, inputs]` and y `[rows, targets]`, fp64, every column `offset`
    standard deviations off."""
    generator = torch.Generator().manual_seed(seed)
    p, q = sum(w for _, w in layout.inputs), sum(w for _, w in layout.targets)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x = draw(rows, p) @ (torch.eye(p, dtype=torch.float64) + 0.3 * draw(p, p))
    y = x @ draw(p, q) + 0.5 * draw(rows, q) + draw(q)
    return x + offset * x.std(0, correction=0), y + offset * y.std(0, correction=0)


def make_planted(
    sender: KVGeometry,
    receiver: KVGeometry,
    reads: dict[int, dict[int, float]],
    *,
    noise: float = 0.01,
    rows: int = 600,
    candidates: int | None = None,
    common: float = 0.0,
    seed: int = 0,
) -> SimpleNamespace:
    """Train and validation moments of rows in which receiver layer i is Σ weight · (a random map of
    sender layer j) over `reads[i]`, plus noise. `common` is the share of variance that all sender
    layers have in common."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    layout = make_layout(sender, receiver, features=True, candidates=candidates)
    p, q = sum(w for _, w in layout.inputs), sum(w for _, w in layout.targets)
    maps = {
        (i, j, name): draw(
            sender.layers[j].stream(name).features, receiver.layers[i].stream(name).features
        )
        for i, sources in reads.items()
        for j in sources
        for name in ("k", "v")
    }
    gathered = {}
    for split, count in (("train", rows), ("validation", rows // 2)):
        x = draw(count, p)
        if common:
            shared = {
                name: draw(count, sender.layers[0].stream(name).features) for name in ("k", "v")
            }
            for (layer, name), where in layout.input_at.items():
                if layer >= 0:
                    x[:, where] = (1 - common) ** 0.5 * x[:, where] + common**0.5 * shared[name]
        y = noise * draw(count, q)
        for (i, j, name), weights in maps.items():
            y[:, layout.target_at[i, name]] += (
                reads[i][j] * x[:, layout.input_at[j, name]] @ weights
            )
        moments = Moments(layout)
        moments.update(x, y)
        gathered[split] = moments
    return SimpleNamespace(layout=layout, **gathered)
