"""A calibration on disk: `calibration.json`, `gate.safetensors` and `SHA256SUMS`, whose digest is
the calibration's.

Written whole or not at all; on reading every digest is verified and every number checked. No
pickle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from kvbridge.asset.folder import Asset
from kvbridge.asset.manifest import Manifest
from kvbridge.asset.tensors import read_tensors
from kvbridge.codec import check_schema, convert, json_bytes, read_json
from kvbridge.errors import CorruptFile
from kvbridge.files import publish_folder, verify_folder
from kvbridge.format import CALIBRATION, MAX_CALIBRATION_TENSORS, METADATA_KEY
from kvbridge.gates.decide.sealed import SHARED, Calibration, SavedCalibration, Statistics
from kvbridge.gates.labels import LABELS
from kvbridge.gates.signals import SIGNALS
from kvbridge.gates.signals.extras import Extras
from kvbridge.geometry import KVGeometry, digest_json
from kvbridge.headers import Header, expect_binding, expect_tensors

BODY, TENSORS = CALIBRATION.description, CALIBRATION.tensors


def save_calibration(calibration: Calibration, path: str | Path) -> str:
    """Writes the folder, whole or not at all, and returns its digest; the same calibration gives
    the same bytes."""
    body = calibration.body()
    tensors = save(_tensors(calibration.extras), metadata={METADATA_KEY: digest_json(body)})
    return publish_folder(Path(path), {BODY: json_bytes(body), TENSORS: tensors})


def _tensors(extras: Extras) -> dict[str, Tensor]:
    tensors = {f"centre.{stream}": t for stream, t in extras.centre.items()}
    tensors |= {f"half.{i}": w for i, w in enumerate(extras.halves)}
    tensors |= {f"residual.{layer}.k": t for layer, t in extras.residual_k.items()}
    tensors |= {f"residual.{layer}.v": t for layer, t in extras.residual_v.items()}
    return {name: t.float().contiguous() for name, t in tensors.items()}


def load_calibration(path: str | Path, asset: Asset) -> Calibration:
    """Reads and verifies a calibration of `asset`. Raises CorruptFile or UnknownSchema; reads no
    pickle."""
    path = Path(path)
    digest = verify_folder(path, required=CALIBRATION.required)
    name = str(path / BODY)
    body = check_schema(
        read_json(path / BODY), CALIBRATION.schema, name, "calibrate again or use its kvbridge"
    )
    saved = convert(body, SavedCalibration, name)
    manifest = asset.manifest
    bound = (asset.digest, manifest.sender.digest, manifest.receiver.digest)
    if (saved.translator, saved.sender, saved.receiver) != bound:
        raise CorruptFile(
            f"{name}: this calibration is of another translator; calibrate {asset.path} again"
        )
    _check_thresholds(saved, name)
    _check_names(saved, name)
    _check_layers(saved.extras, manifest, name)
    extras = _read_extras(path / TENSORS, saved.extras, manifest, digest_json(body))
    shared = {field: getattr(saved, field) for field in SHARED}
    return Calibration(**shared, extras=extras, digest=digest)


def _check_thresholds(saved: SavedCalibration, name: str) -> None:
    """Raises CorruptFile for a ladder of equal rungs, one that never or always climbs, and for a
    threshold that was not tested at this confidence or lies where no request ends."""
    if len({rung.plan for rung in saved.rungs}) != len(saved.rungs):
        raise CorruptFile(f"{name}: expected different repair plans in rungs")
    if len(set(saved.signals)) != len(saved.signals):
        raise CorruptFile(f"{name}: expected different signals")
    if (saved.stop == 1) != (len(saved.rungs) == 1):
        raise CorruptFile(f"{name}: expected stop 1 with one rung, below 1 with several")
    for level in (saved.strict, saved.lenient):
        if level is not None and (level.threshold > saved.stop or level.p > saved.delta):
            raise CorruptFile(f"{name}: expected no threshold above stop and no p above delta")


def _check_names(saved: SavedCalibration, name: str) -> None:
    """Raises CorruptFile unless the label, the signals and every column of theirs are registered
    here."""
    _expect_known([saved.label], LABELS, "label", name)
    _expect_known(saved.signals, SIGNALS, "signal", name)
    columns = {column for signal in saved.signals for column in SIGNALS[signal].columns}
    for rung in saved.rungs:
        _expect_known(rung.score.columns, columns, "column of these signals", name)
        _expect_known(rung.limits, columns, "column of these signals", name)


def _expect_known(names: Iterable[str], known: Collection[str], what: str, name: str) -> None:
    for given in names:
        if given not in known:
            raise CorruptFile(f"{name}: expected a known {what}, found {given!r:.40}")


def _check_layers(statistics: Statistics, manifest: Manifest, name: str) -> None:
    """Raises CorruptFile unless the asset has a factor of each centred stream and its models have
    these layers."""
    _expect_known(statistics.centre, manifest.factors, "stream of the asset's factors", name)
    for layers, model in (
        (statistics.half_layers[0], manifest.sender),
        (statistics.half_layers[1], manifest.sender),
        (statistics.targets, manifest.receiver),
        (statistics.residual, manifest.receiver),
    ):
        if odd := [layer for layer in layers if layer >= len(model.layers)]:
            raise CorruptFile(f"{name}: {model.model_id} has no layer {odd[0]}")


def _read_extras(path: Path, statistics: Statistics, manifest: Manifest, binding: str) -> Extras:
    shapes = _shapes(statistics, manifest)

    def admit(header: Header) -> None:
        expect_tensors(header, shapes, BODY, str(path))
        if odd := [t for t, (dtype, _, _) in header.tensors.items() if dtype != "F32"]:
            raise CorruptFile(f"{path}: expected {odd[0]} in F32")
        expect_binding(header, binding, "this calibration", str(path))

    tensors = read_tensors(path, admit, max_tensors=MAX_CALIBRATION_TENSORS)
    residual_k = {i: tensors[f"residual.{i}.k"] for i in statistics.residual}
    residual_v = {i: tensors[f"residual.{i}.v"] for i in statistics.residual}
    squares = [k.diagonal(dim1=1, dim2=2) for k in residual_k.values()] + list(residual_v.values())
    if any(bool((square < 0).any()) for square in squares):
        raise CorruptFile(
            f"{path}: expected mean squares of residuals, found some below 0; calibrate again"
        )
    return Extras(
        {stream: tensors[f"centre.{stream}"] for stream in statistics.centre},
        residual_k,
        residual_v,
        statistics.half_layers,
        statistics.targets,
        tuple(tensors[half] for half in ("half.0", "half.1") if half in tensors),
    )


def _shapes(statistics: Statistics, manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape of everything that gate.safetensors must hold, as `Extras` describes
    it."""
    sender, receiver = manifest.sender, manifest.receiver
    shapes: dict[str, tuple[int, ...]] = {}
    for stream in statistics.centre:
        shapes[f"centre.{stream}"] = (manifest.factors[stream].rank,)
    outputs = sum(_width(receiver, layer, "v") for layer in statistics.targets)
    for number, half in enumerate(statistics.half_layers):
        if half:
            inputs = sum(_width(sender, layer, "kv") for layer in half)
            shapes[f"half.{number}"] = (inputs + 1, outputs)
    for layer in statistics.residual:
        keys, values = (receiver.layers[layer].stream(stream) for stream in "kv")
        shapes[f"residual.{layer}.k"] = (keys.heads, keys.width, keys.width)
        shapes[f"residual.{layer}.v"] = (values.heads,)
    return shapes


def _width(geometry: KVGeometry, layer: int, streams: str) -> int:
    return sum(geometry.layers[layer].stream(name).features for name in streams)
