"""A translator asset on disk: an immutable folder of manifest, weights, card and sums; and its separate control set."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from kvbridge.asset.card import model_card
from kvbridge.asset.entries import FACTOR, FactorEntry, factor_names
from kvbridge.asset.leverage import Factor
from kvbridge.asset.manifest import Controls, Manifest, controls_json
from kvbridge.asset.maps.translator import Translator
from kvbridge.codec import read_json
from kvbridge.errors import CorruptFile, UsageError
from kvbridge.files import folder_digest, publish_folder, stands_already, verify_folder
from kvbridge.format import CARD, CONTROL_SET, MAX_ASSET_TENSORS, METADATA_KEY, TRANSLATOR
from kvbridge.geometry import digest_json
from kvbridge.headers import check_safetensors_header

MANIFEST, WEIGHTS, CONTROLS = TRANSLATOR.description, TRANSLATOR.tensors, CONTROL_SET.tensors


@dataclass(frozen=True, eq=False)
class Asset:
    """A verified translator asset: the folder it was read from, its digest, its manifest, its translator, and by stream
    what is usual among the rows that it was fitted on (nothing in assets older than that)."""

    path: Path
    digest: str
    manifest: Manifest
    translator: Translator
    factors: Mapping[str, Factor] = field(default_factory=dict)


def save_asset(fit: Any, path: str | Path) -> str:
    """Writes a fit's translator as folder `path`, whole or not at all, and returns its digest.

    The same fit gives the same bytes; the same content twice is no error, other content at `path` raises
    AlreadyExists. The fit's control map goes to `path + ".controls"`, a separate object that names this digest; it is written first, so
    that an asset never stands without it.
    """
    path = Path(path)
    if fit.translator.tensors.keys() != fit.translator.maps.shapes.keys():
        raise UsageError("expected a whole translator to save, found a part of one")
    factors = {s: FactorEntry(f.layers, f.directions.shape[1]) for s, f in fit.factors.items()}
    binding = Manifest.of_fit(fit, factors, weights_bytes=0).binding
    tensors = fit.translator.saved() | _factor_tensors(fit.factors)
    weights = save(tensors, metadata={METADATA_KEY: binding})
    manifest = Manifest.of_fit(fit, factors, weights_bytes=len(weights))
    files = {
        MANIFEST: _json_bytes(manifest.body),
        WEIGHTS: weights,
        CARD: model_card(manifest).encode(),
    }
    digest = folder_digest(files)
    controls: dict[str, bytes] = {}
    if fit.controls is not None:
        body = controls_json(fit.controls, digest)
        controls = {
            MANIFEST: _json_bytes(body),
            CONTROLS: save(fit.controls.saved(), metadata={METADATA_KEY: digest_json(body)}),
        }
        stands_already(CONTROL_SET.beside(path), controls)
    stands_already(path, files)
    if controls:
        publish_folder(CONTROL_SET.beside(path), controls)
    publish_folder(path, files)
    return digest


def load_asset(path: str | Path) -> Asset:
    """Reads and verifies a translator asset. Raises CorruptFile or UnknownSchema; reads no pickle.

    Every byte is hashed, the manifest's geometry and shapes are checked against the header before tensors are
    allocated, and every weight must be finite.
    """
    path = Path(path)
    digest = verify_folder(path, required=frozenset({MANIFEST, WEIGHTS, CARD}))
    manifest = Manifest.from_json(read_json(path / MANIFEST), str(path / MANIFEST))
    weights = path / WEIGHTS
    header = check_safetensors_header(
        weights, max_tensors=MAX_ASSET_TENSORS, max_bytes=manifest.weights_bytes
    )
    manifest.admit(header, weights.stat().st_size, str(weights))
    tensors = _read_tensors(weights)
    translator = Translator(
        manifest.family, manifest.receiver_features, manifest.maps, _of_maps(tensors)
    )
    return Asset(path, digest, manifest, translator, _factors(tensors, manifest.factors, str(path)))


def load_controls(asset: Asset, path: str | Path | None = None) -> Translator:
    """The token-only control map that was solved with `asset`; raises CorruptFile where it is of another one."""
    path = CONTROL_SET.beside(asset.path) if path is None else Path(path)
    verify_folder(path, required=frozenset({MANIFEST, CONTROLS}))
    body = read_json(path / MANIFEST)
    controls = Controls.from_json(body, asset.digest, asset.manifest, str(path))
    weights = path / CONTROLS
    controls.admit(check_safetensors_header(weights, max_tensors=MAX_ASSET_TENSORS), str(weights))
    return Translator(
        "token-only", controls.receiver_features, controls.maps, _read_tensors(weights)
    )


def _factor_tensors(factors: Mapping[str, Factor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for stream, factor in factors.items():
        parts = factor.mean, factor.scale, factor.directions
        found.update(
            zip(
                factor_names(stream),
                (t.detach().cpu().float().contiguous() for t in parts),
                strict=True,
            )
        )
    return found


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a weights file whose header was admitted; all are finite."""
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise CorruptFile(f"{path}: {error}") from error
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise CorruptFile(f"{path}: {bad[0]} holds NaN or infinity")
    return tensors


def _factors(
    tensors: Mapping[str, Tensor], entries: Mapping[str, FactorEntry], name: str
) -> dict[str, Factor]:
    found = {}
    for stream, entry in entries.items():
        mean, scale, directions = (tensors[tensor] for tensor in factor_names(stream))
        if bool((scale <= 0).any()):
            raise CorruptFile(
                f"{name}: expected scales above 0 in {factor_names(stream)[1]}; fetch or fit it again"
            )
        lengths = directions.norm(dim=0)
        if not bool(((lengths > 0) & lengths.isfinite()).all()):
            raise CorruptFile(
                f"{name}: expected directions of some length in {factor_names(stream)[2]}; fetch or fit it again"
            )
        found[stream] = Factor(stream, entry.layers, mean, scale, directions)
    return found


def _of_maps(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(FACTOR)}


def _json_bytes(body: Mapping[str, Any]) -> bytes:
    digest_json(body)
    return (
        json.dumps(body, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    ).encode()
