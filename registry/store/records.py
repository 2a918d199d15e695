"""What the store knows of an object without reading its weights: typed, and read out of its
manifest alone."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from kvbridge import codec
from kvbridge.asset.manifest import Manifest
from kvbridge.codec import Digest
from kvbridge.errors import CorruptFile
from kvbridge.format import FOLDERS
from kvbridge.geometry import KVGeometry

DIGEST = re.compile(r"[0-9a-f]{64}")
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Side:
    """One model of a pair as an asset names it."""

    model_id: str
    commit: str
    geometry: str
    dtype: str
    kv_heads: int
    licence: str | None

    @classmethod
    def of(cls, geometry: KVGeometry) -> Side:
        """The side of a checked geometry."""
        heads = max((s.heads for layer in geometry.layers for s in layer.streams), default=0)
        return cls(
            geometry.model_id,
            geometry.commit,
            geometry.digest,
            geometry.dtype,
            heads,
            geometry.licence,
        )


@dataclass(frozen=True)
class Record:
    """One object: a translator, or something bound to one (`translator` is that one's digest).

    `scores` are the means over layers of the held-out scores; those of the token-only control begin
    with `token_only_`. None where an object has none.
    """

    digest: str
    kind: str
    bytes: int
    translator: str | None = None
    sender: Side | None = None
    receiver: Side | None = None
    family: str | None = None
    receiver_features: str | None = None
    parameters: int | None = None
    scores: dict[str, float | None] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` is its inverse."""
        return codec.to_json(self)

    @classmethod
    def from_json(cls, body: object) -> Record:
        """Of what `to_json` wrote; raises CorruptFile for anything else."""
        return codec.convert(body, cls, "record of the catalog")


def record_of(
    kind: str, digest: str, size_bytes: int, body: Any, name: str
) -> tuple[Record, Manifest | None]:
    """The record of an object whose description is `body`; raises CorruptFile or UnknownSchema
    naming `name`."""
    if kind != "translator":
        return Record(digest, kind, size_bytes, translator=_bound_to(kind, body, name)), None
    manifest = Manifest.from_json(body, name)
    for side in (manifest.sender, manifest.receiver):
        check_name(side.model_id, name)
        if side.commit and not COMMIT.fullmatch(side.commit):
            raise CorruptFile(
                f"{name}: {side.commit[:80]!r} is no full commit; "
                "branches are resolved before fitting"
            )
    record = Record(
        digest,
        kind,
        size_bytes,
        sender=Side.of(manifest.sender),
        receiver=Side.of(manifest.receiver),
        family=manifest.family,
        receiver_features=manifest.receiver_features,
        parameters=body["parameters"],
        scores=mean_scores(manifest.scores),
    )
    return record, manifest


def mean_scores(scores: dict[str, Any]) -> dict[str, float | None]:
    """Means over layers of a checked manifest's held-out scores, and of its control's where it was
    scored."""
    tables = {key: scores[key] for key in ("k_r2", "v_r2", "attention_cosine")}
    tables |= {f"token_only_{key}": values for key, values in scores.get("token_only", {}).items()}
    known = {key: [v for v in values if v is not None] for key, values in tables.items()}
    return {
        key: math.fsum(values) / len(values) if values else None for key, values in known.items()
    }


def check_name(text: str, name: str) -> None:
    """Raises CorruptFile for a model name that is empty, long, or holds control characters or lone
    surrogates."""
    if not 0 < len(text) <= 256 or not text.isprintable():
        raise CorruptFile(f"{name}: {text[:40]!r} cannot be a model's name")


def _bound_to(kind: str, body: object, name: str) -> str:
    """Digest of the translator that an object belongs to."""
    bound = codec.check_schema(body, FOLDERS[kind].schema, name)
    return codec.convert(bound.get("translator"), Digest, f"{name}: translator")
