"""What a saved snapshot says of itself, checked before and after its tensors are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from msgspec import UNSET, Meta, UnsetType
from torch import Tensor

from kvbridge import codec
from kvbridge.cache.provenance import Provenance
from kvbridge.codec import Digest, Index
from kvbridge.errors import CorruptFile
from kvbridge.format import FLOAT_DTYPES, METADATA_KEY, SNAPSHOT_SCHEMA
from kvbridge.geometry import KVGeometry, digest_json, digest_parts
from kvbridge.headers import Header, expect_tensors
from kvbridge.model.digests import tensor_digest
from kvbridge.model.passages import Passage


@dataclass(frozen=True)
class Description:
    """The metadata of a saved snapshot. `digest` covers all the rest and every tensor."""

    text_digest: str
    characters: int
    geometry: KVGeometry
    provenance: Provenance
    digest: str
    passages: tuple[Passage, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `describe` reads them."""
        return codec.to_json(
            SavedDescription(
                SNAPSHOT_SCHEMA,
                self.text_digest,
                self.characters,
                self.geometry,
                self.provenance.to_json(),
                self.digest,
                tuple((p.start, p.end, p.digest) for p in self.passages) or UNSET,
            )
        )

    def content_digest(self, tensors: Mapping[str, Tensor]) -> str:
        """Digest of everything but `digest` itself, and of name, dtype, shape and bytes of every
        tensor."""
        body = self.to_json()
        del body["digest"]
        parts = [digest_json(body)] + [
            f"{name}={tensor_digest(tensor)}" for name, tensor in sorted(tensors.items())
        ]
        return digest_parts(part.encode() for part in parts)


SavedPassage = tuple[Annotated[int, Meta(ge=-1)], Annotated[int, Meta(ge=-1)], Digest]
"""Where a message of a chat stands in the text, on disk: start, end, digest of its characters."""


@dataclass(frozen=True)
class SavedDescription:
    """A description as the file holds it."""

    schema: str
    text_digest: str
    characters: Index
    geometry: KVGeometry
    provenance: dict[str, Any]
    digest: str
    passages: tuple[SavedPassage, ...] | UnsetType = UNSET


def describe(header: Header, name: str) -> Description:
    """The metadata, with the header's tensors checked against its geometry: names, shapes, dtypes.

    Raises UnknownSchema or CorruptFile naming `name`; no tensor is read.
    """
    raw = header.metadata.get(METADATA_KEY, "").encode("utf-8", "replace")
    body = codec.check_schema(codec.parse_json(raw, name), SNAPSHOT_SCHEMA, name)
    saved = codec.convert(body, SavedDescription, name)
    geometry, provenance = saved.geometry, Provenance.from_json(saved.provenance, name)
    if provenance.receiver != geometry.digest:
        raise CorruptFile(f"{name}: expected the provenance of this model's cache")
    if provenance.depth == 0 and provenance.fidelity != "exact":
        raise CorruptFile(f"{name}: a cache that is not exact must say which translation made it")
    tokens = _check_shapes(header, geometry, name)
    if not provenance.covers(len(geometry.layers), tokens):
        raise CorruptFile(f"{name}: the provenance does not cover each cached value once")
    passages = _passages(saved, name)
    return Description(
        saved.text_digest, saved.characters, geometry, provenance, saved.digest, passages
    )


def _passages(saved: SavedDescription, name: str) -> tuple[Passage, ...]:
    """Of a chat; raises CorruptFile where they go back or overlap."""
    rows = () if isinstance(saved.passages, UnsetType) else saved.passages
    passages = tuple(Passage(start, end, digest) for start, end, digest in rows)
    reached = 0
    for passage in passages:
        if passage.located:
            if not reached <= passage.start <= passage.end:
                raise CorruptFile(f"{name}: expected the passages of a chat in order")
            reached = passage.end
        elif passage.end != -1:
            raise CorruptFile(f"{name}: expected no end of a passage that stands nowhere")
    return passages


def _check_shapes(header: Header, geometry: KVGeometry, name: str) -> int:
    """The number of cached tokens; raises CorruptFile unless the tensors are those of such a
    cache."""
    _, ids_shape, _ = header.tensors.get("token_ids", ("", (0,), (0, 0)))
    tokens = ids_shape[0] if len(ids_shape) == 1 else -1
    expected = {"token_ids": (tokens,), "positions": (tokens,), "spans": (tokens, 2)}
    for index, layer in enumerate(geometry.layers):
        for stream in layer.streams:
            expected[f"layers.{index}.{stream.name}"] = (tokens, stream.heads, stream.width)
    expect_tensors(header, expected, "its geometry", name)
    for tensor, (dtype, _, _) in header.tensors.items():
        allowed = FLOAT_DTYPES if tensor.startswith("layers.") else ("I64",)
        if dtype not in allowed:
            raise CorruptFile(f"{name}: {tensor} cannot be of dtype {dtype}")
    return tokens


def check_content(description: Description, tensors: Mapping[str, Tensor], name: str) -> None:
    """Raises CorruptFile unless the tensors are those that were saved, and ids and spans are of one
    text."""
    if description.content_digest(tensors) != description.digest:
        raise CorruptFile(f"{name}: digest does not match; the file was damaged, capture again")
    ids, spans = tensors["token_ids"], tensors["spans"]
    starts, ends = spans.unbind(1)
    bad = [
        bool(((ids < 0) | (ids >= description.geometry.vocabulary)).any()),
        bool(((starts < 0) | (starts > ends) | (ends > description.characters)).any()),
        bool((torch.diff(ends) < 0).any()),
    ]
    if any(bad):
        raise CorruptFile(f"{name}: token ids or spans out of range")
