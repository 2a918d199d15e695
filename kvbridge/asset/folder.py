"""A translator asset on disk: an immutable folder of manifest, weights, card and sums; and its
separate control set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from kvbridge.asset.card import model_card
from kvbridge.asset.entries import factor_names
from kvbridge.asset.leverage import Factor
from kvbridge.asset.manifest import Controls, Manifest, controls_json
from kvbridge.asset.maps.translator import Translator
from kvbridge.asset.tensors import read_tensors
from kvbridge.asset.written import FactorEntry
from kvbridge.codec import json_bytes, read_json
from kvbridge.errors import CorruptFile, UsageError
from kvbridge.files import folder_digest, publish_folder, stands_already, verify_folder
from kvbridge.format import CARD, CONTROL_SET, MAX_ASSET_TENSORS, METADATA_KEY, TRANSLATOR
from kvbridge.geometry import digest_json
from kvbridge.model.arguments import expect, found_in, path_of


@dataclass(frozen=True, eq=False)
class Asset:
    """A verified translator asset: the folder it was read from, its digest, its manifest, its
    translator, and by stream what is usual among the rows that it was fitted on (nothing in assets
    older than that)."""

    path: Path
    digest: str
    manifest: Manifest
    translator: Translator
    factors: Mapping[str, Factor] = field(default_factory=dict)


def save_asset(fit: Any, path: str | Path) -> str:
    """Writes a fit's translator as folder `path`, whole or not at all, and returns its digest.

    The same fit gives the same bytes; the same content twice is no error, other content at `path`
    raises AlreadyExists. The fit's control map goes to `path + ".controls"`, a separate object that
    names this digest; it is written first, so that an asset never stands without it.
    """
    path = path_of(path, "a folder to write the asset to")
    if not isinstance(getattr(fit, "translator", None), Translator):
        raise UsageError(f"expected a finished fit to save, found {found_in(fit)}")
    files = _asset_files(fit)
    digest = folder_digest(files)
    controls: dict[str, bytes] = {}
    if fit.controls is not None:
        controls = _control_files(fit.controls, digest)
        stands_already(CONTROL_SET.beside(path), controls)
    stands_already(path, files)
    if controls:
        publish_folder(CONTROL_SET.beside(path), controls)
    publish_folder(path, files)
    return digest


def _asset_files(fit: Any) -> dict[str, bytes]:
    """Name → bytes of a fit's translator. Raises UsageError for a part of one."""
    translator = fit.translator
    if translator.tensors.keys() != translator.maps.shapes.keys():
        raise UsageError("expected a whole translator to save, found a part of one")
    tensors, factors = translator.saved(), {}
    for stream, factor in fit.factors.items():
        factors[stream] = FactorEntry(factor.layers, factor.directions.shape[1])
        parts = (factor.mean, factor.scale, factor.directions)
        for name, part in zip(factor_names(stream), parts, strict=True):
            tensors[name] = part.detach().cpu().float().contiguous()
    # The weights carry a digest of the manifest and the manifest their size, so the digest leaves
    # the size out.
    binding = Manifest.of_fit(fit, factors, weights_bytes=0).binding
    weights = save(tensors, metadata={METADATA_KEY: binding})
    manifest = Manifest.of_fit(fit, factors, weights_bytes=len(weights))
    return {
        TRANSLATOR.description: json_bytes(manifest.body, ascii_only=False),
        TRANSLATOR.tensors: weights,
        CARD: model_card(manifest).encode(),
    }


def _control_files(controls: Translator, translator_digest: str) -> dict[str, bytes]:
    body = controls_json(controls, translator_digest)
    return {
        CONTROL_SET.description: json_bytes(body, ascii_only=False),
        CONTROL_SET.tensors: save(controls.saved(), metadata={METADATA_KEY: digest_json(body)}),
    }


def load_asset(path: str | Path) -> Asset:
    """Reads and verifies a translator asset. Raises CorruptFile or UnknownSchema; reads no pickle.

    Every byte is hashed, the manifest's geometry and shapes are checked against the header before
    tensors are allocated, and every weight must be finite.
    """
    path = path_of(path, "the folder of an asset")
    digest = verify_folder(path, required=TRANSLATOR.required)
    description, weights = path / TRANSLATOR.description, path / TRANSLATOR.tensors
    manifest = Manifest.from_json(read_json(description), str(description))
    tensors = read_tensors(
        weights,
        lambda header: manifest.admit(header, str(weights)),
        max_tensors=MAX_ASSET_TENSORS,
        announced_bytes=manifest.weights_bytes,
    )
    of_maps = {name: tensors[name] for name in manifest.maps.shapes}
    translator = Translator(manifest.family, manifest.receiver_features, manifest.maps, of_maps)
    factors = {
        stream: _factor(tensors, stream, entry, str(path))
        for stream, entry in manifest.factors.items()
    }
    return Asset(path, digest, manifest, translator, factors)


def load_controls(asset: Asset, path: str | Path | None = None) -> Translator:
    """The token-only control map that was solved with `asset`; raises CorruptFile where it is of
    another one."""
    expect(asset, Asset, "an asset of kvbridge.load_asset")
    path = CONTROL_SET.beside(asset.path) if path is None else path_of(path, "a folder")
    verify_folder(path, required=CONTROL_SET.required)
    body, weights = read_json(path / CONTROL_SET.description), path / CONTROL_SET.tensors
    controls = Controls.from_json(body, asset.digest, asset.manifest, str(path))
    tensors = read_tensors(
        weights,
        lambda header: controls.admit(header, str(weights)),
        max_tensors=MAX_ASSET_TENSORS,
    )
    return Translator("token-only", controls.receiver_features, controls.maps, tensors)


def _factor(tensors: Mapping[str, Tensor], stream: str, entry: FactorEntry, name: str) -> Factor:
    """The factor of one stream; raises CorruptFile where its numbers cannot be what it says."""
    names = factor_names(stream)
    mean, scale, directions = (tensors[part] for part in names)
    if bool((scale <= 0).any()):
        raise CorruptFile(f"{name}: expected scales above 0 in {names[1]}; fetch or fit it again")
    lengths = directions.norm(dim=0)
    if not bool(((lengths > 0) & lengths.isfinite()).all()):
        raise CorruptFile(
            f"{name}: expected directions of some length in {names[2]}; fetch or fit it again"
        )
    return Factor(stream, entry.layers, mean, scale, directions)
