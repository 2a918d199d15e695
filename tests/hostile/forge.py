"""Makes a sound asset without any model, and forges it: changed in one place, every sum and binding
computed anew."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import kvbridge
from kvbridge.asset.manifest import Manifest
from kvbridge.errors import CorruptFile, FileError
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.job import Fit
from kvbridge.fitting.leverage import solve_factors
from kvbridge.fitting.scores import Scores
from kvbridge.fitting.train import solve_controls, solve_maps
from kvbridge.format import SUMS
from kvbridge.geometry import digest_json, digest_text
from tests.fitting.made import make_geometry, make_planted

WEIGHTS, CONTROLS, MANIFEST, CARD = (
    "weights.safetensors",
    "controls.safetensors",
    "manifest.json",
    "README.md",
)


@cache
def made_fit(seed: int = 0, family: str = "full-head", features: str = "embeddings") -> Fit:
    """A fit between two made-up geometries of equal shapes, so that no shape betrays a swap."""
    sender, receiver = make_geometry(f"sender-{seed}"), make_geometry(f"receiver-{seed}")
    config = FitConfig(family=family, layers=2, lambdas=(1e-3,), receiver_features=features)
    data = make_planted(
        sender, receiver, {0: {0: 1.0}, 1: {1: 1.0}, 2: {2: 1.0}}, rows=80, seed=seed
    )
    maps = solve_maps(sender, receiver, data.train, data.validation, config)
    controls = solve_controls(sender, receiver, data.train, data.validation, config)
    r2 = {(layer, s): torch.full((2, 4), 0.5) for layer in range(3) for s in ("k", "v")}
    return Fit(
        translator=maps.translator,
        controls=controls.translator,
        scores=Scores(r2, [0.9] * 3, 10, 2, {}),
        timings={},
        config=config,
        lambdas=maps.lambdas,
        jitter=maps.jitter,
        corpus_digest=digest_text("corpus"),
        splits={s: {"documents": 2, "rows": 20} for s in ("train", "validation", "test")},
        marks=(),
        alignment_exact_share=1.0,
        factors=solve_factors(data.train, maps.translator),
    )


def saved(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A sound asset at `folder`."""
    kvbridge.save_asset(made_fit(seed, **changes), folder)
    return folder


def reseal(folder: Path) -> None:
    """Computes SHA256SUMS anew over whatever files are there."""
    lines = [
        f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n"
        for p in sorted(folder.iterdir())
        if p.name != SUMS
    ]
    (folder / SUMS).write_text("".join(lines))


def split_weights(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join_weights(path: Path, header: Any, data: bytes) -> None:
    """Writes a safetensors file with any header: a mapping, or raw bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def forge_manifest(
    folder: Path, change: Callable[[dict[str, Any]], Any], *, bind: bool = True
) -> None:
    """Changes the manifest (`change` modifies the body or returns another), then weights' binding,
    sizes and sums."""
    body = json.loads((folder / MANIFEST).read_text("utf-8"))
    other = change(body)
    body = body if other is None else other
    if bind and isinstance(body, dict):
        weights = folder / (WEIGHTS if (folder / WEIGHTS).exists() else CONTROLS)
        header, data = split_weights(weights)
        before = weights.stat().st_size
        with contextlib.suppress(ValueError, RecursionError):
            header["__metadata__"] = {"kvbridge": binding_of(body)}
        join_weights(weights, header, data)
        if body.get("weights_bytes") == before:
            body["weights_bytes"] = weights.stat().st_size
    (folder / MANIFEST).write_text(json.dumps(body), "utf-8")
    reseal(folder)


def forge_weights(
    folder: Path, change: Callable[[dict[str, Any], bytes], tuple[Any, bytes]]
) -> None:
    """Changes the weights file's header and data, then the manifest's size of it and the sums."""
    weights = folder / (WEIGHTS if (folder / WEIGHTS).exists() else CONTROLS)
    join_weights(weights, *change(*split_weights(weights)))
    resize(folder)


def resize(folder: Path) -> None:
    """Makes the manifest state the weights' size and reseals."""
    path = folder / MANIFEST
    body = json.loads(path.read_text("utf-8"))
    if "weights_bytes" in body:
        body["weights_bytes"] = (folder / WEIGHTS).stat().st_size
    path.write_text(json.dumps(body), "utf-8")
    reseal(folder)


def binding_of(body: dict[str, Any]) -> str:
    """What the weights of this manifest carry: see Manifest.binding."""
    return digest_json({name: value for name, value in body.items() if name != "weights_bytes"})


def sound_copy(folder: Path) -> Manifest:
    """Proves that forging nothing still loads: what a test changes is all that is wrong."""
    forge_manifest(folder, lambda body: None)
    resize(folder)
    return kvbridge.load_asset(folder).manifest


def refused(
    path: Path,
    kind: type[FileError] = CorruptFile,
    load: Callable[[Path], Any] = kvbridge.load_asset,
) -> str:
    """What `load` says when it refuses `path` with an error of exactly this kind."""
    with pytest.raises(FileError) as refusal:
        load(path)
    assert type(refusal.value) is kind, repr(refusal.value)
    assert len(str(refusal.value)) < 2000
    return str(refusal.value)


def set_at(*path, value):
    """A change of a manifest: body[path] = value."""

    def change(body):
        for step in path[:-1]:
            body = body[step]
        body[path[-1]] = value

    return change


def drop(*path):
    """A change of a manifest: del body[path]."""

    def change(body):
        for step in path[:-1]:
            body = body[step]
        del body[path[-1]]

    return change
