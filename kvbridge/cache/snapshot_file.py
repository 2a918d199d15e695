"""What a saved snapshot says of itself, checked before and after its tensors are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbridge.cache.provenance import Provenance
from kvbridge.codec import parse_json
from kvbridge.errors import CorruptFile, UnknownSchema
from kvbridge.format import FLOAT_DTYPES, METADATA_KEY, SNAPSHOT_SCHEMA
from kvbridge.geometry import KVGeometry, digest_json, digest_parts
from kvbridge.headers import Header
from kvbridge.model.digests import tensor_digest


@dataclass(frozen=True)
class Description:
    """The metadata of a saved snapshot. `digest` covers all the rest and every tensor."""

    text_digest: str
    characters: int
    geometry: KVGeometry
    provenance: Provenance
    digest: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `describe` reads them."""
        return {
            "schema": SNAPSHOT_SCHEMA,
            "text_digest": self.text_digest,
            "characters": self.characters,
            "geometry": self.geometry.to_json(),
            "provenance": self.provenance.to_json(),
            "digest": self.digest,
        }

    def content_digest(self, tensors: Mapping[str, Tensor]) -> str:
        """Digest of everything but `digest` itself, and of name, dtype, shape and bytes of every tensor."""
        body = self.to_json()
        del body["digest"]
        parts = [digest_json(body)] + [
            f"{name}={tensor_digest(tensor)}" for name, tensor in sorted(tensors.items())
        ]
        return digest_parts(part.encode() for part in parts)


def describe(header: Header, name: str) -> Description:
    """The metadata, with the header's tensors checked against its geometry: names, shapes, dtypes.

    Raises UnknownSchema or CorruptFile naming `name`; no tensor is read.
    """
    body = parse_json(header.metadata.get(METADATA_KEY, "").encode("utf-8", "replace"), name)
    if not isinstance(body, dict) or "schema" not in body:
        raise CorruptFile(f"{name}: expected a saved snapshot, found something else")
    if body["schema"] != SNAPSHOT_SCHEMA:
        raise UnknownSchema(
            f"{name}: expected {SNAPSHOT_SCHEMA}, found {str(body['schema'])[:80]!r}"
        )
    fields = {
        "schema": str,
        "text_digest": str,
        "characters": int,
        "geometry": dict,
        "provenance": dict,
        "digest": str,
    }
    if set(body) != set(fields) or any(
        type(body[field]) is not kind for field, kind in fields.items()
    ):
        raise CorruptFile(
            f"{name}: expected {', '.join(fields)} of their kinds, found {str(body)[:120]}"
        )
    geometry, provenance = (
        KVGeometry.from_json(body["geometry"]),
        Provenance.from_json(body["provenance"]),
    )
    if not 0 <= body["characters"] < 1 << 63 or provenance.receiver != geometry.digest:
        raise CorruptFile(
            f"{name}: expected characters ≥ 0 and the provenance of this model's cache"
        )
    if provenance.depth == 0 and provenance.fidelity != "exact":
        raise CorruptFile(f"{name}: a cache that is not exact must say which translation made it")
    _, shape, _ = header.tensors.get("token_ids", ("", (0,), (0, 0)))
    count = shape[0] if len(shape) == 1 else -1
    expected = {"token_ids": (count,), "positions": (count,), "spans": (count, 2)}
    for index, layer in enumerate(geometry.layers):
        expected |= {f"layers.{index}.{s.name}": (count, s.heads, s.width) for s in layer.streams}
    found = {tensor: shape for tensor, (_, shape, _) in header.tensors.items()}
    if found != expected:
        odd = sorted(t for t in found.keys() | expected.keys() if found.get(t) != expected.get(t))
        raise CorruptFile(
            f"{name}: tensors do not match its geometry: {', '.join(ascii(t)[:80] for t in odd[:4])}"
        )
    for tensor, (dtype, _, _) in header.tensors.items():
        if dtype not in (FLOAT_DTYPES if tensor.startswith("layers.") else ("I64",)):
            raise CorruptFile(f"{name}: {tensor} cannot be of dtype {dtype}")
    if not provenance.covers(len(geometry.layers), count):
        raise CorruptFile(f"{name}: the provenance does not cover each cached value once")
    return Description(
        body["text_digest"], body["characters"], geometry, provenance, body["digest"]
    )


def check_content(found: Description, tensors: Mapping[str, Tensor], name: str) -> None:
    """Raises CorruptFile unless the tensors are those that were saved, and ids and spans are of one text."""
    if found.content_digest(tensors) != found.digest:
        raise CorruptFile(f"{name}: digest does not match; the file was damaged, capture again")
    ids, spans = tensors["token_ids"], tensors["spans"]
    starts, ends = spans.unbind(1)
    bad = [
        bool(((ids < 0) | (ids >= found.geometry.vocabulary)).any()),
        bool(((starts < 0) | (starts > ends) | (ends > found.characters)).any()),
        bool((torch.diff(ends) < 0).any()),
    ]
    if any(bad):
        raise CorruptFile(f"{name}: token ids or spans out of range")
