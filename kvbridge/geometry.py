"""What a model's KV cache looks like, and which exact model it belongs to. No torch: manifests use
it too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from msgspec import Meta

from kvbridge import codec
from kvbridge.codec import Count
from kvbridge.errors import UsageError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Bytes of a cached number, by the model's dtype."""


@dataclass(frozen=True)
class Stream:
    """One cached tensor of a layer, `[tokens, heads, width]`."""

    name: str
    heads: Count
    width: Count
    rotated: bool

    @property
    def features(self) -> int:
        """Numbers per token."""
        return self.heads * self.width


@dataclass(frozen=True)
class LayerGeometry:
    """One decoder layer: its kind (`full` or `sliding`), window in tokens, streams and weights
    digest."""

    kind: Annotated[str, codec.one_of("full", "sliding")]
    streams: Annotated[tuple[Stream, ...], Meta(min_length=1)]
    window_tokens: Count | None
    weights_digest: str

    def __post_init__(self) -> None:
        if len({stream.name for stream in self.streams}) != len(self.streams):
            raise UsageError(f"expected each stream of a layer once, found {self.streams}")

    def stream(self, name: str) -> Stream:
        """The stream of that name; KeyError where the layer has none."""
        for stream in self.streams:
            if stream.name == name:
                return stream
        raise KeyError(name)


@dataclass(frozen=True)
class KVGeometry:
    """The contract of a model's cache: shapes and everything that alters a value in it.

    `weights_digest` covers every tensor (adapters included), `embedding_digest` what enters layer
    0, each layer's digest its own tensors. `attention_heads` counts query heads per layer,
    `layer_parameters` the numbers in all decoder layers together.
    """

    model_id: str
    commit: str
    architecture: str
    dtype: Annotated[str, codec.one_of(*DTYPE_BYTES)]
    hidden_size: Count
    attention_heads: Count
    max_positions: Count
    vocabulary: Count
    parameters: Count
    layer_parameters: Count
    layers: Annotated[tuple[LayerGeometry, ...], Meta(min_length=1)]
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
        numbers = sum(stream.features for layer in self.layers for stream in layer.streams)
        return DTYPE_BYTES[self.dtype] * numbers

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` is its inverse."""
        return codec.to_json(self)

    @classmethod
    def from_json(cls, body: object, name: str = "geometry of a model") -> KVGeometry:
        """Raises CorruptFile naming `name` where a field is missing, unknown, of another type or
        out of range."""
        return codec.convert(body, cls, name)


def shared_layers(sender: KVGeometry, receiver: KVGeometry) -> int:
    """How many leading layers cache bit-identical KV in both models for the same tokens.

    Layer i's KV follows from the tokens, the embedding, RoPE, adapters and the weights of layers
    0..i: it is shared while all of those are identical. A tuned model that keeps its lower layers
    shares them with its base.
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
    for sender_layer, receiver_layer in zip(sender.layers, receiver.layers, strict=False):
        if sender_layer != receiver_layer:
            break
        count += 1
    return count


_NAMES = ("model_id", "commit", "licence")
"""Fields of a geometry that alter no value."""
_WEIGHTS = {"layers", "embedding_digest", "weights_digest"}


def difference(expected: KVGeometry, loaded: KVGeometry) -> str:
    """How a loaded model differs from the one that something belongs to, as the end of a sentence
    about it: its dtype or its adapters in words, otherwise the fields of the contract."""
    before, now = expected.to_json(), loaded.to_json()
    fields = [name for name in before if name not in _NAMES and before[name] != now[name]]
    # Rounding to another dtype changes every weight, and rotations that are measured with them.
    if "dtype" in fields and set(fields) <= {"dtype", "rope_digest", *_WEIGHTS}:
        return (
            f"is loaded as {loaded.dtype}, not as {expected.dtype}: load it with "
            f"--dtype {expected.dtype} (in code, dtype=torch.{expected.dtype})"
        )
    if "adapters" in fields:
        wanted, live = (", ".join(side.adapters) or "none" for side in (expected, loaded))
        return f"has other adapters: {live}, not {wanted}"
    if fields and set(fields) <= _WEIGHTS and _same_shapes(expected, loaded):
        return (
            f"differs in its weights ({', '.join(fields)}): either they are others, or the same "
            "ones were hashed in another dtype, for `load` hashes a checkpoint as it is stored and "
            "`wrap` a model as it stands; make both models in the same way"
        )
    return f"differs in {', '.join(fields)}"


def _same_shapes(a: KVGeometry, b: KVGeometry) -> bool:
    """Whether layers differ in nothing but their weights."""
    return [replace(layer, weights_digest="") for layer in a.layers] == [
        replace(layer, weights_digest="") for layer in b.layers
    ]


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


def hash_draw(name: str) -> float:
    """A number in [0, 1) that a hash of the name draws: the same on every machine, in any order."""
    return int(digest_text(name)[:16], 16) / 2**64


def digest_parts(parts: Iterable[bytes]) -> str:
    """SHA-256 of length-prefixed parts, so that no two sequences of parts collide."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()
