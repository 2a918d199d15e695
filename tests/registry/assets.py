"""Tiny assets made without torch and without a fit: real folders that `load_asset` accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from kvbridge.asset.card import model_card
from kvbridge.asset.manifest import Manifest
from kvbridge.asset.maps.base import Block
from kvbridge.asset.maps.dense import DenseMaps, Group
from kvbridge.files import publish_folder
from kvbridge.format import CALIBRATION, CONTROL_SET, TRANSLATOR
from kvbridge.geometry import KVGeometry, LayerGeometry, Stream, digest_json


def geometry(
    name: str, *, heads: int = 2, width: int = 4, layers: int = 2, commit: str = ""
) -> KVGeometry:
    streams = (Stream("k", heads, width, True), Stream("v", heads, width, False))
    return KVGeometry(
        model_id=name,
        commit=commit,
        architecture="TinyForCausalLM",
        dtype="float32",
        hidden_size=heads * width,
        attention_heads=heads,
        max_positions=128,
        vocabulary=64,
        parameters=1000,
        layer_parameters=800,
        layers=tuple(LayerGeometry("full", streams, None, f"{name}-{i}") for i in range(layers)),
        tokenizer_digest="t" * 64,
        rope_digest="r" * 64,
        config_digest="c" * 64,
        embedding_digest=f"e-{name}",
        weights_digest=f"w-{name}",
        licence="apache-2.0",
    )


def maps(
    sender: KVGeometry, receiver: KVGeometry, *, layers: tuple[int, ...] = (0, 1)
) -> DenseMaps:
    """Maps of every receiver layer but the first that read sender `layers`."""
    groups = {
        (i, s.name): (Group(tuple(range(s.heads)), tuple(Block(a, s.name) for a in layers)),)
        for i in range(1, len(receiver.layers))
        for s in receiver.layers[i].streams
    }
    return DenseMaps(sender, receiver, True, groups)


def files(
    sender: KVGeometry | None = None,
    receiver: KVGeometry | None = None,
    *,
    seed: int = 0,
    dtype: Any = np.float32,
    change: Any = None,
) -> dict[str, bytes]:
    """Name → bytes of a translator asset; `change(body)` may alter the manifest before it is
    written."""
    sender, receiver = (
        sender or geometry("org/sender"),
        receiver or geometry("org/receiver", width=6),
    )
    entries, random = maps(sender, receiver), np.random.default_rng(seed)
    tensors = {
        name: random.standard_normal(shape).astype(dtype) for name, shape in entries.shapes.items()
    }
    layers = list(entries.layers)
    body: dict[str, Any] = {
        "schema": TRANSLATOR.schema,
        "sender": sender.to_json(),
        "receiver": receiver.to_json(),
        "family": "full-head",
        "receiver_features": "embeddings",
        "config": {"layers": 2},
        "maps": entries.to_json(),
        "lambda": {},
        "jitter": {},
        "corpus_digest": "c" * 64,
        "splits": {"test": {"documents": 1, "rows": 8}},
        "scores": {
            "split": "test",
            "layers": layers,
            "k_r2": [0.7 for _ in layers],
            "v_r2": [0.6 for _ in layers],
            "attention_cosine": [0.9 for _ in layers],
            "token_only": {"k_r2": [0.5 for _ in layers], "v_r2": [0.25 for _ in layers]},
        },
        "weights_bytes": 0,
        "parameters": sum(t.size for t in tensors.values()),
        "licences": {"sender": sender.licence, "receiver": receiver.licence},
        "marks": [],
        "alignment_exact_share": 1.0,
    }
    if change is not None:
        change(body)
    weights = save(
        tensors, metadata={"kvbridge": Manifest(body, sender, receiver, entries).binding}
    )
    body["weights_bytes"] = len(weights)
    card = model_card(Manifest(body, sender, receiver, entries))
    return {
        "manifest.json": json.dumps(body).encode(),
        "weights.safetensors": weights,
        "README.md": card.encode(),
    }


def build(
    path: Path, sender: KVGeometry | None = None, receiver: KVGeometry | None = None, **options: Any
) -> Path:
    """Writes a translator asset as folder `path`."""
    publish_folder(path, files(sender, receiver, **options))
    return path


def controls(path: Path, translator: str, *, seed: int = 0) -> Path:
    """Writes a control set of an asset made with the default geometries."""
    receiver = geometry("org/receiver", width=6)
    entries = maps(geometry("org/sender"), receiver, layers=())
    random = np.random.default_rng(seed)
    tensors = {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in entries.shapes.items()
    }
    body = {
        "schema": CONTROL_SET.schema,
        "translator": translator,
        "receiver_features": "embeddings",
        "maps": entries.to_json(),
    }
    publish_folder(
        path,
        {
            "manifest.json": json.dumps(body).encode(),
            "controls.safetensors": save(tensors, metadata={"kvbridge": digest_json(body)}),
        },
    )
    return path


def calibration(
    path: Path,
    translator: str,
    *,
    tensors: Any = None,
    change: Any = None,
    binding: str | None = None,
) -> Path:
    """Writes what binds a calibration to an asset made with the default geometries; not what a gate
    could load."""
    sender, receiver = geometry("org/sender"), geometry("org/receiver", width=6)
    body = {
        "schema": CALIBRATION.schema,
        "translator": translator,
        "sender": sender.digest,
        "receiver": receiver.digest,
        **(change or {}),
    }
    tensors = {"factor": np.ones((2, 3), np.float32)} if tensors is None else tensors
    gate = save(tensors, metadata={"kvbridge": binding or digest_json(body)})
    publish_folder(path, {"calibration.json": json.dumps(body).encode(), "gate.safetensors": gate})
    return path
