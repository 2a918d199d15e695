"""The state of one handoff: what was asked, and what each stage has made of it so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from kvbridge.cache.align import Alignment
from kvbridge.cache.features import FirstLayers
from kvbridge.cache.snapshot import KVSnapshot, LayerKV
from kvbridge.engines.port import Recomputed
from kvbridge.errors import UsageError
from kvbridge.handoff.common import Common
from kvbridge.handoff.decision import Decision
from kvbridge.handoff.plan import RepairPlan
from kvbridge.model.passages import Passage
from kvbridge.model.text import Encoding

_Part = TypeVar("_Part")


@dataclass(frozen=True, eq=False)
class Aligned:
    """Of `align`: over the receiver's `cached` tokens, which sender row each reads (`alignment`;
    known tokens read none and count as not covered), which tokens are recomputed (`chosen` `[n]`,
    int64, ascending, never known ones), and how many leading layers the sender computes bit for bit
    alike."""

    alignment: Alignment
    chosen: Tensor
    shared_layers: int


@dataclass(frozen=True, eq=False)
class Features:
    """Of `features`: the receiver's own first layers over the tokens that it does not know yet
    (None where none were needed), how many leading layers are exact, computed or shared, and what
    the maps read of the receiver, `hidden` `[cached − start, hidden]` fp32 (None where they read
    nothing)."""

    first: FirstLayers | None
    exact_layers: int
    hidden: Tensor | None


@dataclass(frozen=True, eq=False)
class Translation:
    """Of `translate`: receiver layer → stream → `[rows, heads, width]` fp32 in content space, and
    which of the receiver's tokens these `rows` `[rows]` are. Empty where every layer is exact."""

    rows: Tensor
    content: dict[int, LayerKV]


@dataclass(frozen=True, eq=False)
class Rotated:
    """Of `rotate`: every layer's rows `[cached, heads, width]` as the receiver caches them, before
    any token is recomputed: known and exact rows, the translated `rows` `[rows]`, zeros
    elsewhere."""

    rows: Tensor
    layers: list[LayerKV]


@dataclass(frozen=True, eq=False)
class Repaired:
    """Of `repair`: every layer's rows `[cached, heads, width]` with the chosen tokens recomputed,
    and what the receiver's forward of them left."""

    layers: list[LayerKV]
    forward: Recomputed


@dataclass(frozen=True, eq=False)
class Request:
    """One handoff on its way. `snapshot` is the sender's, `text` and `encoding` are what the
    receiver goes on from, `known` is what the receiver has of it already (its own snapshot of the
    prompt's beginning). `observed`: somebody looks at the evidence, so that chosen tokens are
    translated, too, and their states and queries are kept. `passages`: where the messages of a chat
    stand in `text`. `common`: where that is not simply the snapshot's text or goes on from it, what
    both have alike; `check` fills it in.

    Each stage fills in one of the later fields. A refused request keeps what it had, and every
    later stage hands it on as it is.
    """

    snapshot: KVSnapshot
    text: str
    encoding: Encoding
    plan: RepairPlan
    known: KVSnapshot | None = None
    observed: bool = False
    passages: tuple[Passage, ...] = ()
    common: Common | None = None
    refusal: Decision | None = None
    aligned: Aligned | None = None
    features: Features | None = None
    translation: Translation | None = None
    rotated: Rotated | None = None
    repaired: Repaired | None = None
    decision: Decision | None = None

    @property
    def cached(self) -> int:
        """Tokens of the receiver that get a cache entry: all but the last."""
        return len(self.encoding) - 1

    @property
    def start(self) -> int:
        """The first token that the receiver does not know: stages work on `[start, cached)`."""
        return 0 if self.known is None else min(len(self.known), self.cached)

    @property
    def rows(self) -> Tensor:
        """Tokens `[rows]` that this plan asks the maps for: covered ones that are not recomputed,
        and all covered ones where somebody looks."""
        aligned = after("align", self.aligned)
        wanted = aligned.alignment.covered.clone()
        if not self.observed:
            wanted[aligned.chosen] = False
        return wanted.nonzero()[:, 0]

    def due(self, part: object) -> bool:
        """Whether a stage that fills in `part` has something to do: no refusal, and not done
        yet."""
        return self.refusal is None and part is None


def after(stage: str, part: _Part | None) -> _Part:
    """`part` of a request, which `stage` fills in; raises UsageError where that stage has not
    run."""
    if part is None:
        raise UsageError(f"expected a request that has been through {stage}")
    return part
