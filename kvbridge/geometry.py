"""What a model's KV cache looks like, and which exact model it belongs to. No torch: manifests use it too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from kvbridge.errors import CorruptFile


@dataclass(frozen=True)
class Stream:
    """One cached tensor of a layer, `[tokens, heads, width]`."""

    name: str
    heads: int
    width: int
    rotated: bool

    @property
    def features(self) -> int:
        """Numbers per token."""
        return self.heads * self.width


@dataclass(frozen=True)
class LayerGeometry:
    """One decoder layer: its kind (`full` or `sliding`), window in tokens, streams and weights digest."""

    kind: str
    streams: tuple[Stream, ...]
    window_tokens: int | None
    weights_digest: str

    def stream(self, name: str) -> Stream:
        """The stream of that name; KeyError where the layer has none."""
        for stream in self.streams:
            if stream.name == name:
                return stream
        raise KeyError(name)


@dataclass(frozen=True)
class KVGeometry:
    """The contract of a model's cache: shapes and everything that alters a value in it.

    `weights_digest` covers every tensor (adapters included), `embedding_digest` what enters layer 0,
    each layer's digest its own tensors. `attention_heads` counts query heads per layer, `layer_parameters` the numbers
    in all decoder layers together.
    """

    model_id: str
    commit: str
    architecture: str
    dtype: str
    hidden_size: int
    attention_heads: int
    max_positions: int
    vocabulary: int
    parameters: int
    layer_parameters: int
    layers: tuple[LayerGeometry, ...]
    tokenizer_digest: str
    rope_digest: str
    config_digest: str
    embedding_digest: str
    weights_digest: str
    adapters: tuple[str, ...] = ()
    licence: str | None = None

    @cached_property
    def digest(self) -> str:
        """Digest of what alters cached values; names, commit and licence do not."""
        body = self.to_json()
        for name in ("model_id", "commit", "licence"):
            del body[name]
        return digest_json(body)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of cache per token, all layers and streams."""
        size = {"float32": 4, "float64": 8}.get(self.dtype, 2)
        return size * sum(stream.features for layer in self.layers for stream in layer.streams)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` is its inverse."""
        body = asdict(self)
        body["layers"] = [
            {**layer, "streams": [dict(stream) for stream in layer["streams"]]}
            for layer in body["layers"]
        ]
        body["adapters"] = list(self.adapters)
        return body

    @classmethod
    def from_json(cls, body: Any) -> KVGeometry:
        """Raises CorruptFile when a field is missing, unknown, of another type or out of range."""
        try:
            layers = tuple(_layer(layer) for layer in _of(list, _exactly(cls, body)["layers"]))
            rest = {
                name: value for name, value in body.items() if name not in ("layers", "adapters")
            }
            for name, value in rest.items():
                if name in _COUNTS:
                    _count(value)
                elif not (name == "licence" and value is None):
                    _of(str, value)
            if not layers or rest["dtype"] not in _DTYPES:
                raise TypeError(
                    f"expected layers and a dtype of {', '.join(_DTYPES)}, found {rest['dtype']:.40}"
                )
            return cls(
                **rest,
                layers=layers,
                adapters=tuple(_of(str, a) for a in _of(list, body["adapters"])),
            )
        except TypeError as error:
            raise CorruptFile(
                f"expected the geometry of a model, found something else: {str(error)[:200]}"
            ) from error


_COUNTS = (
    "hidden_size",
    "attention_heads",
    "max_positions",
    "vocabulary",
    "parameters",
    "layer_parameters",
)


_DTYPES = ("float32", "bfloat16", "float16", "float64")
_KINDS = ("full", "sliding")


def _layer(body: Any) -> LayerGeometry:
    """One layer out of JSON; raises TypeError."""
    window = _exactly(LayerGeometry, body)["window_tokens"]
    streams = tuple(
        Stream(_of(str, s["name"]), _count(s["heads"]), _count(s["width"]), _of(bool, s["rotated"]))
        for s in (_exactly(Stream, one) for one in _of(list, body["streams"]))
    )
    if body["kind"] not in _KINDS or not streams:
        raise TypeError(
            f"expected a layer of kind {' or '.join(_KINDS)} with streams, found {str(body)[:80]}"
        )
    if len({s.name for s in streams}) != len(streams):
        raise TypeError("expected each stream of a layer once")
    window_tokens = None if window is None else _count(window)
    return LayerGeometry(body["kind"], streams, window_tokens, _of(str, body["weights_digest"]))


def _exactly(kind: type, body: Any) -> dict[str, Any]:
    """`body` itself; raises TypeError unless it maps exactly the fields of `kind`."""
    if set(_of(dict, body)) != {f.name for f in fields(kind)}:
        raise TypeError(f"unexpected or missing fields in {str(body)[:80]}")
    return body


def _count(value: Any) -> int:
    """A number from 1 to 2⁶³ − 1."""
    if not 1 <= _of(int, value) < 1 << 63:
        raise TypeError(f"expected a number of at least 1, found {str(value)[:40]}")
    return value


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {repr(value)[:80]}")
    return value


def shared_layers(sender: KVGeometry, receiver: KVGeometry) -> int:
    """How many leading layers cache bit-identical KV in both models for the same tokens.

    Layer i's KV follows from the tokens, the embedding, RoPE, adapters and the weights of layers 0..i: it is shared
    while all of those are identical. A tuned model that keeps its lower layers shares them with its base.
    """
    same_inputs = (
        sender.tokenizer_digest == receiver.tokenizer_digest
        and sender.embedding_digest == receiver.embedding_digest
        and sender.rope_digest == receiver.rope_digest
        and sender.config_digest == receiver.config_digest
        and sender.dtype == receiver.dtype
        and sender.architecture == receiver.architecture
        and sender.adapters == receiver.adapters
    )
    if not same_inputs:
        return 0
    count = 0
    for ours, theirs in zip(sender.layers, receiver.layers, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


def digest_json(body: Any) -> str:
    """SHA-256 of canonical JSON (sorted keys, no spaces, no NaN)."""
    text = json.dumps(
        body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


def digest_text(text: str) -> str:
    """SHA-256 of the text's UTF-8 bytes; lone surrogates are kept apart, not merged."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def short_name(document: str) -> str:
    """A document's name as assets and calibrations keep it: 64 bits of a digest, in hexadecimal."""
    return digest_text(document)[:16]


def digest_parts(parts: Iterable[bytes]) -> str:
    """SHA-256 of length-prefixed parts, so that no two sequences of parts collide."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()
