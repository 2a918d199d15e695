"""What a bridge shows to those who decide over its handoffs, and what it expects of them: a gate, a ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from kvbridge.asset.folder import Asset
from kvbridge.cache.align import Alignment
from kvbridge.cache.provenance import Decision
from kvbridge.cache.snapshot import KVSnapshot, LayerKV
from kvbridge.handoff.repair import RepairPlan
from kvbridge.model.attention import Queries
from kvbridge.model.load import Model


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a gate may look at. `translated[layer][stream]` `[cached, heads, width]` is the cache as translated (rotated,
    receiver dtype) before any token was recomputed, `repaired` after; `chosen` `[n]` the recomputed tokens; `states`
    `[n + 1, hidden]` what leaves the receiver's last layer for the chosen tokens and for the prompt's last one, under the
    repaired cache, `queries` the attention queries of the same tokens; `exact_layers` how many leading layers are the
    receiver's own; `spans` `[tokens, 2]` of ids in the text; `parts` the FLOPs of the handoff by part of the work.
    """

    sender: Model
    receiver: Model
    asset: Asset | None
    snapshot: KVSnapshot
    text: str
    ids: Tensor
    plan: RepairPlan
    chosen: Tensor
    translated: list[LayerKV]
    repaired: list[LayerKV]
    features: Tensor | None
    alignment: Alignment
    parts: Mapping[str, int]
    states: Tensor
    exact_layers: int
    spans: Tensor
    queries: Queries

    @property
    def predicted_flops(self) -> int:
        """FLOPs of the whole handoff."""
        return sum(self.parts.values())


class Gate(Protocol):
    """Decides whether one translated cache may be used."""

    def decide(self, evidence: Evidence) -> Decision:
        """A Decision; never raises for a request that is merely bad."""
        ...


@runtime_checkable
class NotingGate(Gate, Protocol):
    """A gate that is told of decisions it had no part in, too: refusals before it, and handoffs that are exact throughout."""

    def note(
        self, decision: Decision, snapshot: KVSnapshot, ids: Tensor, plan: RepairPlan
    ) -> Decision:
        """The decision to act on, the same or a refusal; called once per request that `decide` never sees. `ids` `[tokens]` are
        the receiver's."""
        ...


class Ledger(Protocol):
    """Accounts for the bytes of translators in use."""

    def lease(self, asset: Asset) -> Any:
        """A context manager that holds the asset's bytes, or None when there is no room."""
        ...
