"""What an asset says of itself, typed and checked. No torch: stores read manifests without a
model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvbridge import codec
from kvbridge.asset.entries import check_factors, check_tensors, maps_json, read_maps
from kvbridge.asset.maps import Maps
from kvbridge.asset.written import AssetBody, ControlBody, FactorEntry
from kvbridge.errors import CorruptFile, UnknownSchema
from kvbridge.format import CONTROL_SET, TRANSLATOR
from kvbridge.geometry import KVGeometry, digest_json, short_name
from kvbridge.headers import Header, expect_binding

_LAMBDA = "lambda"
_ADVICE = "use the matching kvbridge or fit again"


@dataclass(frozen=True)
class Manifest:
    """A translator asset's manifest; `body` is the JSON as written."""

    body: dict[str, Any]
    sender: KVGeometry
    receiver: KVGeometry
    maps: Maps
    factors: Mapping[str, FactorEntry] = field(default_factory=dict)

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
        """What the weights' own metadata carries: a digest of everything here but their size, so
        that weights of another pair or another fit are told apart even where all shapes agree."""
        return digest_json(
            {name: value for name, value in self.body.items() if name != "weights_bytes"}
        )

    @cached_property
    def scores(self) -> dict[str, Any]:
        """Held-out scores on the test split."""
        return self.body["scores"]

    @cached_property
    def fitted_on(self) -> frozenset[str] | None:
        """Short names (64 bits of a digest) of the documents that weights and λ are from; None
        where the asset says none."""
        return frozenset(self.body["fitted_on"]) if "fitted_on" in self.body else None

    def knows(self, document: str) -> bool:
        """Whether the maps were fitted on the document of this name: nothing measured on it says
        how they do elsewhere."""
        return self.fitted_on is not None and short_name(document) in self.fitted_on

    def admit(self, header: Header, name: str) -> None:
        """Raises CorruptFile unless weights with this header are those announced here, down to each
        shape and dtype."""
        check_tensors(header, self.maps, name, self.factors)
        expect_binding(header, self.binding, "this manifest", name)

    @classmethod
    def of_fit(
        cls, fit: Any, factors: Mapping[str, FactorEntry], *, weights_bytes: int
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
            _LAMBDA: fit.lambdas,
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
        """Raises UnknownSchema for another version and CorruptFile for anything malformed, naming
        `name`."""
        body = codec.check_schema(body, TRANSLATOR.schema, name, _ADVICE)
        codec.convert(body.get(_LAMBDA), dict[str, Any], f"{name}: {_LAMBDA}")
        rest = {key: value for key, value in body.items() if key != _LAMBDA}
        written = codec.convert(rest, AssetBody, name)
        maps = read_maps(written.maps, written.sender, written.receiver, name)
        _check_features(written.receiver_features, maps, name)
        if written.parameters != maps.parameters:
            raise CorruptFile(
                f"{name}: maps of {maps.parameters} parameters, the manifest says "
                f"{written.parameters}"
            )
        factors = written.leverage if isinstance(written.leverage, dict) else {}
        check_factors(factors, written.sender, name)
        return cls(body, written.sender, written.receiver, maps, factors)


@dataclass(frozen=True)
class Controls:
    """A control set's manifest; `binding` is what the weights' own metadata carries."""

    receiver_features: str
    maps: Maps
    binding: str

    def admit(self, header: Header, name: str) -> None:
        """Raises CorruptFile unless weights with this header are those announced here, down to each
        shape and dtype."""
        check_tensors(header, self.maps, name)
        expect_binding(header, self.binding, "this manifest", name)

    @classmethod
    def from_json(cls, body: Any, translator_digest: str, asset: Manifest, name: str) -> Controls:
        """Raises UnknownSchema or CorruptFile where this is no control set of the translator with
        that digest."""
        if not isinstance(body, dict) or body.get("schema") != CONTROL_SET.schema:
            raise UnknownSchema(f"{name}: expected schema {CONTROL_SET.schema}")
        written = codec.convert(body, ControlBody, name)
        if written.translator != translator_digest:
            raise CorruptFile(
                f"{name}: these controls are of another translator; expected {translator_digest}, "
                f"found {written.translator[:80]}"
            )
        maps = read_maps(written.maps, asset.sender, asset.receiver, name)
        _check_features(written.receiver_features, maps, name)
        if not maps.features or maps.reads(range(len(asset.receiver.layers))):
            raise CorruptFile(
                f"{name}: a control reads receiver features, and nothing of the sender"
            )
        return cls(written.receiver_features, maps, digest_json(body))


def controls_json(translator: Any, translator_digest: str) -> dict[str, Any]:
    """What `Controls.from_json` reads, of the control map of the translator with that digest."""
    return {
        "schema": CONTROL_SET.schema,
        "translator": translator_digest,
        "receiver_features": translator.receiver_features,
        "maps": maps_json(translator.maps),
    }


def _check_features(features: str, maps: Maps, name: str) -> None:
    """Raises CorruptFile unless the receiver has these features, and the maps read them if there
    are any."""
    _, hidden, layer = features.partition("hidden:")
    if hidden and int(layer) >= len(maps.receiver.layers):
        raise CorruptFile(f"{name}: {maps.receiver.model_id} has no receiver features {features}")
    if maps.features != (features != "none"):
        raise CorruptFile(f"{name}: receiver features are {features}, and the maps disagree")
