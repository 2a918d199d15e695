"""A calibration on disk: `calibration.json`, `gate.safetensors` and `SHA256SUMS`, whose digest is the calibration's.

Written whole or not at all; on reading every digest is verified and every number checked. No pickle.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from kvbridge.asset.folder import Asset
from kvbridge.asset.manifest import Manifest
from kvbridge.codec import read_json
from kvbridge.errors import CorruptFile, UnknownSchema, UsageError
from kvbridge.files import publish_folder, verify_folder
from kvbridge.format import CALIBRATION, MAX_CALIBRATION_TENSORS, MAX_RUNGS, METADATA_KEY
from kvbridge.gates.decide.guarantee import Tested
from kvbridge.gates.decide.score import Score
from kvbridge.gates.decide.sealed import Calibration, Rung
from kvbridge.gates.labels import LABELS
from kvbridge.gates.signals import SIGNALS
from kvbridge.gates.signals.extras import Extras
from kvbridge.geometry import KVGeometry, digest_json
from kvbridge.handoff.plan import RepairPlan
from kvbridge.headers import check_safetensors_header

BODY, TENSORS = CALIBRATION.description, CALIBRATION.tensors
_NAME = re.compile(r"[0-9a-f]{16}")
_FIELDS = frozenset(
    {
        "schema",
        "translator",
        "sender",
        "receiver",
        "label",
        "tau",
        "alpha",
        "lenient_alpha",
        "delta",
        "signals",
        "rungs",
        "stop",
        "strict",
        "lenient",
        "conformal",
        "needed",
        "counts",
        "report",
        "corpus_digest",
        "documents",
        "extras",
    }
)


def save_calibration(calibration: Calibration, path: str | Path) -> str:
    """Writes the folder, whole or not at all, and returns its digest; the same calibration gives the same bytes."""
    body = calibration.body()
    raw = (json.dumps(body, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()
    tensors = _tensors(calibration.extras)
    return publish_folder(
        Path(path), {BODY: raw, TENSORS: save(tensors, metadata={METADATA_KEY: digest_json(body)})}
    )


def _tensors(extras: Extras) -> dict[str, Tensor]:
    found = {f"centre.{stream}": t for stream, t in extras.centre.items()}
    found |= {f"half.{i}": w for i, w in enumerate(extras.halves)}
    found |= {f"residual.{layer}.k": t for layer, t in extras.residual_k.items()}
    found |= {f"residual.{layer}.v": t for layer, t in extras.residual_v.items()}
    return {name: t.float().contiguous() for name, t in found.items()}


def load_calibration(path: str | Path, asset: Asset) -> Calibration:
    """Reads and verifies a calibration of `asset`. Raises CorruptFile or UnknownSchema; reads no pickle."""
    path = Path(path)
    digest = verify_folder(path, required=frozenset({BODY, TENSORS}))
    body, name = read_json(path / BODY), str(path / BODY)
    if not isinstance(body, dict) or body.get("schema") != CALIBRATION.schema:
        raise UnknownSchema(
            f"{name}: expected schema {CALIBRATION.schema}; use the matching kvbridge or calibrate again"
        )
    if set(body) != _FIELDS:
        raise CorruptFile(
            f"{name}: unexpected or missing fields: {', '.join(sorted(set(body) ^ _FIELDS))[:200]}"
        )
    manifest = asset.manifest
    bound = (asset.digest, manifest.sender.digest, manifest.receiver.digest)
    if (body["translator"], body["sender"], body["receiver"]) != bound:
        raise CorruptFile(
            f"{name}: this calibration is of another translator; calibrate {asset.path} again"
        )
    try:
        plain = _plain(body, name)
        layers = _layers(body["extras"], manifest)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError) as error:
        raise CorruptFile(f"{name}: malformed: {repr(error)[:200]}") from error
    extras = _read_extras(path / TENSORS, body, layers, manifest)
    return Calibration(**plain, extras=extras, digest=digest)


def _plain(body: dict[str, Any], name: str) -> dict[str, Any]:
    signals = tuple(_known(s, SIGNALS) for s in _list(body["signals"]))
    columns = frozenset(c for s in signals for c in SIGNALS[s].columns)
    rungs = tuple(_rung(r, columns, name) for r in _list(body["rungs"]))
    if (
        not 1 <= len(rungs) <= MAX_RUNGS
        or len({r.plan for r in rungs}) != len(rungs)
        or len(set(signals)) != len(signals)
    ):
        raise ValueError("expected different plans and signals")
    counts, report = body["counts"], body["report"]
    if not isinstance(counts, dict) or any(type(v) is not int or v < 0 for v in counts.values()):
        raise ValueError("expected counts")
    if not isinstance(report, dict) or type(body["corpus_digest"]) is not str:
        raise ValueError("expected a report and a corpus digest")
    documents = _list(body["documents"])
    if not all(type(d) is str and _NAME.fullmatch(d) for d in documents):
        raise ValueError("expected names of documents")
    levels = {k: _within(body[k], 0, 1) for k in ("alpha", "lenient_alpha", "delta")}
    tau = None if body["tau"] is None else _within(body["tau"], 0, 1e6)
    conformal = None if body["conformal"] is None else _within(body["conformal"], 0, 1)
    if type(body["needed"]) is not int or body["needed"] < 1:
        raise ValueError("expected how many items are needed")
    stop = _within(body["stop"], 0, 1)
    strict, lenient = (_tested(body[k], levels["delta"]) for k in ("strict", "lenient"))
    if (stop == 1) != (len(rungs) == 1) or any(
        t is not None and t.threshold > stop for t in (strict, lenient)
    ):
        raise ValueError(
            "expected stop 1 with one rung, below 1 with several, and no threshold above it"
        )
    return {
        "translator": body["translator"],
        "sender": body["sender"],
        "receiver": body["receiver"],
        "label": _known(body["label"], LABELS),
        "tau": tau,
        **levels,
        "signals": signals,
        "rungs": rungs,
        "stop": stop,
        "strict": strict,
        "lenient": lenient,
        "conformal": conformal,
        "needed": body["needed"],
        "counts": counts,
        "report": report,
        "corpus_digest": body["corpus_digest"],
        "documents": frozenset(documents),
    }


def _rung(body: Any, columns: frozenset[str], name: str) -> Rung:
    if set(body) != {"plan", "score", "limits"} or set(body["plan"]) != {
        "sinks",
        "tail",
        "layers",
        "tokens",
    }:
        raise ValueError("expected plan, score and limits")
    plan = body["plan"]
    numbers = [plan["sinks"], plan["tail"], plan["layers"], *_list(plan["tokens"])]
    if any(type(n) is not int or not 0 <= n < 1 << 31 for n in numbers):
        raise ValueError("expected whole numbers in a plan")
    limits = {_known(c, columns): _within(v, -1e30, 1e30) for c, v in body["limits"].items()}
    try:
        found = RepairPlan(plan["sinks"], plan["tail"], plan["layers"], tuple(plan["tokens"]))
    except UsageError as error:
        raise ValueError(str(error)) from error
    return Rung(found, Score.from_json(body["score"], columns, name), limits)


def _tested(body: Any, delta: float) -> Tested | None:
    if body is None:
        return None
    if set(body) != {"threshold", "items", "failures", "p"}:
        raise ValueError("expected a tested threshold")
    if (
        type(body["items"]) is not int
        or type(body["failures"]) is not int
        or not 0 <= body["failures"] <= body["items"]
    ):
        raise ValueError("expected counts of a tested threshold")
    return Tested(
        _within(body["threshold"], 0, 1),
        body["items"],
        body["failures"],
        _within(body["p"], 0, delta),
    )


def _layers(
    body: Any, manifest: Manifest
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...], list[int]]:
    if set(body) != {"centre", "half_layers", "targets", "residual"}:
        raise ValueError("expected the layers of the statistics")
    ours, theirs = len(manifest.sender.layers), len(manifest.receiver.layers)
    centre = tuple(_known(s, manifest.factors) for s in _list(body["centre"]))
    a, b = (tuple(_layer(i, ours) for i in _list(half)) for half in _list(body["half_layers"]))
    targets = tuple(_layer(i, theirs) for i in _list(body["targets"]))
    residual = [_layer(i, theirs) for i in _list(body["residual"])]
    return centre, (a, b), targets, residual


def _read_extras(path: Path, body: dict[str, Any], layers: Any, manifest: Manifest) -> Extras:
    centre, halves, targets, residual = layers
    sender, receiver = manifest.sender, manifest.receiver
    outputs = sum(_width(receiver, i, "v") for i in targets)
    expected: dict[str, tuple[int, ...]] = {
        **{f"centre.{stream}": (manifest.factors[stream].rank,) for stream in centre},
        **{
            f"half.{n}": (sum(_width(sender, i, "kv") for i in half) + 1, outputs)
            for n, half in enumerate(halves)
            if half
        },
        **{
            f"residual.{i}.k": (k.heads, k.width, k.width)
            for i in residual
            for k in (receiver.layers[i].stream("k"),)
        },
        **{f"residual.{i}.v": (receiver.layers[i].stream("v").heads,) for i in residual},
    }
    header = check_safetensors_header(path, max_tensors=MAX_CALIBRATION_TENSORS)
    found = {n: (dtype, shape) for n, (dtype, shape, _) in header.tensors.items()}
    if found != {n: ("F32", shape) for n, shape in expected.items()}:
        odd = sorted(
            n for n in found.keys() | expected.keys() if found.get(n) != ("F32", expected.get(n))
        )
        raise CorruptFile(
            f"{path}: tensors do not match calibration.json: {', '.join(n[:80] for n in odd[:4])}"
        )
    if header.metadata != {METADATA_KEY: digest_json(body)}:
        raise CorruptFile(f"{path}: these tensors are not of this calibration; calibrate again")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise CorruptFile(f"{path}: {error}") from error
    bad = [n for n, t in tensors.items() if not bool(torch.isfinite(t).all())]
    squares = [
        t
        for i in residual
        for t in (tensors[f"residual.{i}.v"], tensors[f"residual.{i}.k"].diagonal(dim1=1, dim2=2))
    ]
    if bad:
        raise CorruptFile(f"{path}: {bad[0]} holds NaN or infinity")
    if any(bool((t < 0).any()) for t in squares):
        raise CorruptFile(
            f"{path}: expected mean squares of residuals, found some below 0; calibrate again"
        )
    both = tuple(tensors[n] for n in ("half.0", "half.1") if n in tensors)
    return Extras(
        {stream: tensors[f"centre.{stream}"] for stream in centre},
        {i: tensors[f"residual.{i}.k"] for i in residual},
        {i: tensors[f"residual.{i}.v"] for i in residual},
        halves,
        targets,
        both,
    )


def _layer(value: Any, count: int) -> int:
    return value if type(value) is int and 0 <= value < count else _fail(f"no layer {value!r:.40}")


def _width(geometry: KVGeometry, layer: int, streams: str) -> int:
    return sum(geometry.layers[layer].stream(name).features for name in streams)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else _fail(f"expected a list, found {value!r:.40}")


def _known(value: Any, names: Any) -> str:
    return value if type(value) is str and value in names else _fail(f"{value!r:.40} is not known")


def _within(value: Any, low: float, high: float) -> float:
    fine = type(value) in (int, float) and low <= value <= high
    return (
        float(value)
        if fine
        else _fail(f"expected a number from {low:g} to {high:g}, found {value!r:.40}")
    )


def _fail(message: str) -> Any:
    raise ValueError(message)
