"""Snapshots of whatever an engine has computed."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbridge.cache.provenance import Provenance, exact_provenance
from kvbridge.cache.snapshot import KVSnapshot, LayerKV
from kvbridge.engines.port import Engine
from kvbridge.geometry import digest_text


def captured(engine: Engine, text: str) -> KVSnapshot:
    """The engine's own prefill of `text`."""
    ids = engine.encode(text).ids
    return snapshot_of(engine, ids, engine.prefill(ids))


def snapshot_of(
    engine: Engine,
    ids: Tensor,
    layers: list[LayerKV],
    provenance: Provenance | None = None,
) -> KVSnapshot:
    """Of rows `[cached, heads, width]` per layer and stream (referenced, not copied) of the first
    `cached` of ids `[tokens]`; the engine's own where no provenance says otherwise."""
    cached = len(layers[0]["k"])
    text, encoding = engine.encode_ids(ids[:cached])
    end = int(encoding.spans[-1, 1]) if cached else 0
    own = exact_provenance(engine.geometry.digest, len(layers), cached)
    return KVSnapshot(
        token_ids=encoding.ids,
        positions=torch.arange(cached),
        spans=encoding.spans,
        text_digest=digest_text(text[:end]),
        characters=end,
        layers=tuple(layers),
        geometry=engine.geometry,
        provenance=own if provenance is None else provenance,
    )
