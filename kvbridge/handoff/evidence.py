"""What those who decide over a handoff may look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvbridge.asset.folder import Asset
from kvbridge.cache.align import Alignment
from kvbridge.cache.snapshot import KVSnapshot, LayerKV
from kvbridge.engines.port import RecordedQueries
from kvbridge.handoff.cost import request_parts
from kvbridge.handoff.pair import Pair
from kvbridge.handoff.plan import RepairPlan
from kvbridge.handoff.request import Repaired, Request, after


@dataclass(frozen=True, eq=False)
class Evidence:
    """A view of one observed request after its repair; nothing in it is to be modified."""

    pair: Pair
    request: Request

    @property
    def sender(self) -> Any:
        """The sender as the bridge was given it."""
        return self.pair.sender.model

    @property
    def receiver(self) -> Any:
        """The receiver as the bridge was given it."""
        return self.pair.receiver.model

    @property
    def asset(self) -> Asset | None:
        """The asset whose translator is judged; None for a bare translator."""
        return self.pair.asset

    @property
    def snapshot(self) -> KVSnapshot:
        """The sender's cache."""
        return self.request.snapshot

    @property
    def text(self) -> str:
        """What the receiver goes on from."""
        return self.request.text

    @property
    def ids(self) -> Tensor:
        """The same in the receiver's tokens, `[tokens]`."""
        return self.request.encoding.ids

    @property
    def spans(self) -> Tensor:
        """Characters of each of `ids` in the text, `[tokens, 2]`."""
        return self.request.encoding.spans

    @property
    def plan(self) -> RepairPlan:
        """What is recomputed."""
        return self.request.plan

    @property
    def start(self) -> int:
        """How many of the first tokens the receiver had exactly before the handoff."""
        return self.request.start

    @property
    def alignment(self) -> Alignment:
        """Which sender row each cached token reads; tokens before `start` are not covered."""
        return after("align", self.request.aligned).alignment

    @property
    def chosen(self) -> Tensor:
        """The recomputed tokens, `[n]`."""
        return after("align", self.request.aligned).chosen

    @property
    def exact_layers(self) -> int:
        """How many leading layers are the receiver's own."""
        return after("features", self.request.features).exact_layers

    @cached_property
    def features(self) -> Tensor | None:
        """What the maps read of the receiver, `[cached, hidden]` fp32 (zeros before `start`)."""
        hidden = after("features", self.request.features).hidden
        if hidden is None or self.start == 0:
            return hidden
        return torch.cat((hidden.new_zeros(self.start, hidden.shape[1]), hidden))

    @property
    def translated(self) -> list[LayerKV]:
        """`[layer][stream]` `[cached, heads, width]`: the cache as translated (rotated, in the
        receiver's dtype) before any token was recomputed."""
        return after("rotate", self.request.rotated).layers

    @property
    def repaired(self) -> list[LayerKV]:
        """The same after the repair."""
        return self._repaired.layers

    @property
    def states(self) -> Tensor:
        """What leaves the receiver's last layer for the chosen tokens and for the prompt's last
        one, under the repaired cache, `[n + 1, hidden]`."""
        return after("repair of an observed request", self._repaired.forward.states)

    @property
    def queries(self) -> RecordedQueries:
        """The attention queries of the same tokens."""
        return after("repair of an observed request", self._repaired.forward.queries)

    @cached_property
    def parts(self) -> Mapping[str, int]:
        """FLOPs of the handoff by part of the work."""
        return request_parts(self.pair, self.request)

    @property
    def predicted_flops(self) -> int:
        """FLOPs of the whole handoff."""
        return sum(self.parts.values())

    @property
    def _repaired(self) -> Repaired:
        return after("repair", self.request.repaired)
