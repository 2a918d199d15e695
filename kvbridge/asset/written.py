"""What the manifests of a translator and of a control set hold, field by field. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from kvbridge import codec
from kvbridge.codec import Count, Index, Share, ShortName
from kvbridge.format import MAX_FITTED_DOCUMENTS
from kvbridge.geometry import KVGeometry

_LARGEST = 1e308
ReceiverFeatures = Annotated[str, Meta(pattern=r"\A(none|embeddings|hidden:[1-9][0-9]{0,8})\Z")]
LayerScores = tuple[Annotated[float, Meta(gt=-_LARGEST, lt=_LARGEST)] | None, ...]
"""A number per layer, None where nothing varies."""


@dataclass(frozen=True)
class FactorEntry:
    """The factor of one stream: the sender layers whose rows it is of, side by side, and its number
    of directions."""

    layers: Annotated[tuple[Index, ...], Meta(min_length=1)]
    rank: Index

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return codec.to_json(self)


@dataclass(frozen=True)
class Licences:
    """What the base models' cards state."""

    sender: str | None
    receiver: str | None


@dataclass(frozen=True)
class ControlScores:
    """R² of the token-only control per layer."""

    k_r2: LayerScores
    v_r2: LayerScores


@dataclass(frozen=True)
class HeldOutScores:
    """Scores of the test split. What later versions of a fit added may be missing."""

    split: Annotated[str, codec.one_of("test")]
    layers: Annotated[tuple[int, ...], Meta(min_length=1)]
    k_r2: LayerScores
    v_r2: LayerScores
    attention_cosine: LayerScores
    token_only: ControlScores | UnsetType = UNSET
    rows: Any = UNSET
    documents: Any = UNSET
    k_r2_heads: Any = UNSET
    v_r2_heads: Any = UNSET
    k_r2_dimensions: Any = UNSET
    v_r2_dimensions: Any = UNSET
    single_layer_r2: Any = UNSET

    def __post_init__(self) -> None:
        tables = [self.k_r2, self.v_r2, self.attention_cosine]
        if isinstance(self.token_only, ControlScores):
            tables += [self.token_only.k_r2, self.token_only.v_r2]
        if any(len(table) != len(self.layers) for table in tables):
            raise ValueError("expected held-out scores for every layer; fit again")


@dataclass(frozen=True)
class AssetBody:
    """A translator's manifest but for `lambda`, which Python does not let a field be called."""

    schema: str
    sender: KVGeometry
    receiver: KVGeometry
    family: str
    receiver_features: ReceiverFeatures
    config: dict[str, Any]
    maps: Any
    jitter: dict[str, Any]
    corpus_digest: str
    splits: dict[str, Any]
    scores: HeldOutScores
    weights_bytes: Index
    parameters: Count
    licences: Licences
    marks: tuple[str, ...]
    alignment_exact_share: Share
    fitted_on: (
        Annotated[tuple[ShortName, ...], Meta(max_length=MAX_FITTED_DOCUMENTS)] | UnsetType
    ) = UNSET
    leverage: dict[str, FactorEntry] | UnsetType = UNSET


@dataclass(frozen=True)
class ControlBody:
    """A control set's manifest."""

    schema: str
    translator: str
    receiver_features: ReceiverFeatures
    maps: Any
