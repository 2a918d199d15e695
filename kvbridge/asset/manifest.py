"""What an asset says of itself, typed and checked. No torch: stores read manifests without loading a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvbridge.asset.entries import (
    FactorEntry,
    check_tensors,
    maps_json,
    read_factors,
    read_maps,
)
from kvbridge.asset.maps import Maps
from kvbridge.errors import CorruptFile, UnknownSchema
from kvbridge.format import CONTROL_SET, MAX_FITTED_DOCUMENTS, METADATA_KEY, TRANSLATOR
from kvbridge.geometry import KVGeometry, digest_json, short_name
from kvbridge.headers import Header

_NAME = re.compile(r"[0-9a-f]{16}")
_FEATURES = re.compile(r"none|embeddings|hidden:([1-9][0-9]{0,8})")
_SCORES = frozenset(
    {
        "split",
        "rows",
        "documents",
        "layers",
        "k_r2",
        "v_r2",
        "k_r2_heads",
        "v_r2_heads",
        "k_r2_dimensions",
        "v_r2_dimensions",
        "attention_cosine",
        "single_layer_r2",
        "token_only",
    }
)
_FIELDS = (
    "schema",
    "sender",
    "receiver",
    "family",
    "receiver_features",
    "config",
    "maps",
    "lambda",
    "jitter",
    "corpus_digest",
    "splits",
    "scores",
    "weights_bytes",
    "parameters",
    "licences",
    "marks",
    "alignment_exact_share",
)
_OPTIONAL = ("fitted_on", "leverage")


@dataclass(frozen=True)
class Manifest:
    """A translator asset's manifest; `body` is the JSON as written."""

    body: dict[str, Any]
    sender: KVGeometry
    receiver: KVGeometry
    maps: Maps
    factors: Mapping[str, FactorEntry] = field(default_factory=dict)

    def admit(self, header: Header, size_bytes: int, name: str) -> None:
        """Raises CorruptFile unless weights of that header and size are those announced here, to each shape and dtype."""
        if size_bytes != self.weights_bytes:
            raise CorruptFile(f"{name}: {size_bytes} bytes, the manifest says {self.weights_bytes}")
        check_tensors(header, self.maps, name, self.factors)
        check_binding(header, self.binding, name)

    @property
    def family(self) -> str:
        """Map family, a key of kvbridge.fitting.families.FAMILIES."""
        return self.body["family"]

    @property
    def receiver_features(self) -> str:
        """`none`, `embeddings` or `hidden:m`."""
        return self.body["receiver_features"]

    @property
    def weights_bytes(self) -> int:
        """Size of weights.safetensors in bytes."""
        return self.body["weights_bytes"]

    @cached_property
    def binding(self) -> str:
        """What the weights' own metadata carries: a digest of everything here but their size, so that weights of another
        pair or another fit are told apart even where all shapes agree."""
        return digest_json(
            {name: value for name, value in self.body.items() if name != "weights_bytes"}
        )

    @cached_property
    def scores(self) -> dict[str, Any]:
        """Held-out scores on the test split."""
        return self.body["scores"]

    @cached_property
    def fitted_on(self) -> frozenset[str] | None:
        """Short names (64 bits of a digest) of the documents that weights and λ are from; None where the asset says none."""
        return frozenset(self.body["fitted_on"]) if "fitted_on" in self.body else None

    def knows(self, document: str) -> bool:
        """Whether the maps were fitted on the document of this name: nothing measured on it says how they do elsewhere."""
        return self.fitted_on is not None and short_name(document) in self.fitted_on

    @classmethod
    def of_fit(
        cls,
        fit: Any,
        factors: Mapping[str, FactorEntry],
        *,
        weights_bytes: int,
    ) -> Manifest:
        """The manifest of a finished fit; nothing in it depends on the time or the machine."""
        translator = fit.translator
        body = {
            "schema": TRANSLATOR.schema,
            "sender": translator.sender.to_json(),
            "receiver": translator.receiver.to_json(),
            "family": translator.family,
            "receiver_features": translator.receiver_features,
            "config": fit.config.to_json(),
            "maps": maps_json(translator.maps),
            "lambda": fit.lambdas,
            "jitter": fit.jitter,
            "corpus_digest": fit.corpus_digest,
            "splits": fit.splits,
            "scores": fit.scores.to_json(),
            "weights_bytes": weights_bytes,
            "parameters": translator.parameters,
            "licences": {
                "sender": translator.sender.licence,
                "receiver": translator.receiver.licence,
            },
            "marks": list(fit.marks),
            "alignment_exact_share": fit.alignment_exact_share,
        }
        if fit.fitted_on is not None:
            body["fitted_on"] = list(fit.fitted_on)
        if factors:
            body["leverage"] = {stream: entry.to_json() for stream, entry in factors.items()}
        return cls(body, translator.sender, translator.receiver, translator.maps, factors)

    @classmethod
    def from_json(cls, body: Any, name: str) -> Manifest:
        """Raises UnknownSchema for another version and CorruptFile for anything malformed, naming `name`."""
        if not isinstance(body, dict) or "schema" not in body:
            raise CorruptFile(f"{name}: expected a translator manifest, found none")
        if body["schema"] != TRANSLATOR.schema:
            raise UnknownSchema(
                f"{name}: expected schema {TRANSLATOR.schema}, found {body['schema']!r}; use the matching kvbridge or fit again"
            )
        if set(body) - set(_OPTIONAL) != set(_FIELDS):
            odd = sorted((set(body) - set(_OPTIONAL)) ^ set(_FIELDS))
            raise CorruptFile(f"{name}: unexpected or missing fields: {', '.join(odd)}")
        sender, receiver = (
            KVGeometry.from_json(body["sender"]),
            KVGeometry.from_json(body["receiver"]),
        )
        plain = {
            "family": str,
            "receiver_features": str,
            "weights_bytes": int,
            "parameters": int,
            "corpus_digest": str,
            "scores": dict,
            "config": dict,
            "splits": dict,
            "licences": dict,
            "marks": list,
            "lambda": dict,
            "jitter": dict,
            "alignment_exact_share": float,
        }
        for key, kind in plain.items():
            if type(body[key]) is not kind:
                raise CorruptFile(f"{name}: {key} must be {kind.__name__}, found {body[key]!r:.80}")
        texts = [*body["marks"], *(t for t in body["licences"].values() if t is not None)]
        if set(body["licences"]) != {"sender", "receiver"} or any(
            type(text) is not str for text in texts
        ):
            raise CorruptFile(
                f"{name}: licences must be those of sender and receiver, and marks must be strings"
            )
        if not 0 <= body["alignment_exact_share"] <= 1 or body["scores"].get("split") != "test":
            raise CorruptFile(
                f"{name}: expected an alignment share from 0 to 1 and scores of the test split"
            )
        _check_names(body.get("fitted_on", []), name)
        _check_scores(body["scores"], name)
        maps = read_maps(body["maps"], sender, receiver, name)
        _check_features(body["receiver_features"], maps, name)
        if body["parameters"] != maps.parameters:
            raise CorruptFile(
                f"{name}: maps of {maps.parameters} parameters, parameters says {body['parameters']}"
            )
        return cls(
            body, sender, receiver, maps, read_factors(body.get("leverage", {}), sender, name)
        )


def _check_names(names: Any, name: str) -> None:
    """Raises CorruptFile unless these are at most MAX_FITTED_DOCUMENTS short names of documents."""
    if not isinstance(names, list) or len(names) > MAX_FITTED_DOCUMENTS:
        raise CorruptFile(
            f"{name}: fitted_on must be a list of at most {MAX_FITTED_DOCUMENTS:,} names, found {str(names)[:80]}"
        )
    odd = next((n for n in names if type(n) is not str or _NAME.fullmatch(n) is None), None)
    if odd is not None:
        raise CorruptFile(
            f"{name}: fitted_on must hold names of 16 hexadecimal digits, found {odd!r:.80}"
        )


def _check_scores(scores: dict[str, Any], name: str) -> None:
    """Raises CorruptFile unless there is a number or null per layer for both streams and the attention outputs, and
    likewise for the token-only control where it was scored (fits before that was done lack `token_only`)."""
    if unknown := set(scores) - _SCORES:
        raise CorruptFile(f"{name}: unexpected scores: {', '.join(sorted(unknown))[:200]}")
    layers, control = scores.get("layers"), scores.get("token_only", {})
    if (
        not isinstance(layers, list)
        or not layers
        or any(type(layer) is not int for layer in layers)
    ):
        raise CorruptFile(f"{name}: expected held-out scores per layer, found none; fit again")
    tables = {key: scores.get(key) for key in ("k_r2", "v_r2", "attention_cosine")}
    if "token_only" in scores:
        if not isinstance(control, dict) or set(control) != {"k_r2", "v_r2"}:
            raise CorruptFile(
                f"{name}: expected k_r2 and v_r2 of the token-only control, found {str(control)[:80]}"
            )
        tables |= {f"token_only {key}": values for key, values in control.items()}
    for key, values in tables.items():
        if not isinstance(values, list) or len(values) != len(layers):
            raise CorruptFile(
                f"{name}: expected held-out scores per layer ({key}), found none; fit again"
            )
        if any(
            v is not None and (type(v) not in (int, float) or not -1e308 < v < 1e308)
            for v in values
        ):
            raise CorruptFile(f"{name}: score {key} holds something that is not a number")


def _check_features(features: str, maps: Maps, name: str) -> None:
    """Raises CorruptFile unless `features` is `none`, `embeddings` or `hidden:m` of the receiver, and the maps agree."""
    match, receiver = _FEATURES.fullmatch(features), maps.receiver
    if match is None or (match[1] and int(match[1]) >= len(receiver.layers)):
        raise CorruptFile(f"{name}: {receiver.model_id} has no receiver features {features!r:.40}")
    if maps.features != (features != "none"):
        raise CorruptFile(f"{name}: receiver features are {features}, and the maps disagree")


@dataclass(frozen=True)
class Controls:
    """A control set's manifest; `binding` is what the weights' own metadata carries."""

    receiver_features: str
    maps: Maps
    binding: str

    @classmethod
    def from_json(cls, body: Any, translator_digest: str, asset: Manifest, name: str) -> Controls:
        """Raises UnknownSchema or CorruptFile where this is no control set of the translator with that digest."""
        if not isinstance(body, dict) or body.get("schema") != CONTROL_SET.schema:
            raise UnknownSchema(f"{name}: expected schema {CONTROL_SET.schema}")
        if body.get("translator") != translator_digest:
            raise CorruptFile(
                f"{name}: these controls are of another translator; expected {translator_digest}, "
                f"found {str(body.get('translator'))[:80]}"
            )
        if set(body) != {"schema", "translator", "receiver_features", "maps"}:
            raise CorruptFile(
                f"{name}: expected schema, translator, receiver_features and maps only"
            )
        features = body["receiver_features"]
        if not isinstance(features, str) or features == "none":
            raise CorruptFile(f"{name}: receiver_features must be embeddings or hidden:m")
        maps = read_maps(body["maps"], asset.sender, asset.receiver, name)
        _check_features(features, maps, name)
        if maps.reads(range(len(asset.receiver.layers))):
            raise CorruptFile(f"{name}: a control that reads the sender is none")
        return cls(features, maps, digest_json(body))

    def admit(self, header: Header, name: str) -> None:
        """Raises CorruptFile unless weights with this header are those announced here, down to each shape and dtype."""
        check_tensors(header, self.maps, name)
        check_binding(header, self.binding, name)


def controls_json(translator: Any, translator_digest: str) -> dict[str, Any]:
    """What `Controls.from_json` reads, of the control map of the translator with that digest."""
    return {
        "schema": CONTROL_SET.schema,
        "translator": translator_digest,
        "receiver_features": translator.receiver_features,
        "maps": maps_json(translator.maps),
    }


def check_binding(header: Header, binding: str, name: str) -> None:
    """Raises CorruptFile unless the weights name the description that they were written with."""
    if header.metadata != {METADATA_KEY: binding}:
        raise CorruptFile(f"{name}: these weights are not of this manifest; fetch or fit it again")
