"""One item's prompt, and what several conditions share of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from kvbridge.cache.prefill import capture
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.errors import EvalError
from kvbridge.eval.conditions.setup import Setup
from kvbridge.eval.tasks.items import Item
from kvbridge.eval.tasks.start import Start
from kvbridge.handoff.bridge import Bridge
from kvbridge.handoff.cost import prefill_flops
from kvbridge.handoff.plan import RepairPlan
from kvbridge.handoff.request import Request


@dataclass(frozen=True, eq=False)
class Prepared:
    """A request up to its translated cache, and the milliseconds of every stage before it."""

    request: Request
    stages_ms: dict[str, float]


@dataclass(eq=False)
class Prompt:
    """One item's prompt for one setup, and what several conditions share: computed once, on first
    use. `donor` is another document's text; `dense_tails` are prefills of the last tokens alone,
    `prepared` translated caches by bridge and snapshot."""

    setup: Setup
    item: Item
    donor: str
    dense_tails: dict[int, Start] = field(default_factory=dict)
    prepared: dict[tuple[Bridge, KVSnapshot], Prepared] = field(default_factory=dict)

    @cached_property
    def ids(self) -> Tensor:
        """The receiver's tokens of the prompt, `[tokens]`."""
        return self.setup.receiver.encode(self.item.prompt).ids

    @cached_property
    def snapshot(self) -> KVSnapshot:
        """The sender's cache of the prompt."""
        return capture(self.setup.sender, self.item.prompt)

    @cached_property
    def wrong_snapshot(self) -> KVSnapshot:
        """Another document's sender cache, under this prompt's ids, spans and text digest: only its
        content tells."""
        ids, count = self.setup.sender.encode(self.donor).ids, len(self.snapshot)
        if len(ids) < count:
            raise EvalError(
                f"{self.item.id}: the other document has {len(ids)} tokens, {count} are needed"
            )
        other = capture(self.setup.sender, input_ids=ids[:count])
        layers = tuple(dict(layer) for layer in other.layers)
        return replace(self.snapshot, layers=layers)

    @cached_property
    def prefill_flops(self) -> int:
        """FLOPs of the receiver's own prefill."""
        return prefill_flops(self.setup.receiver.geometry, len(self.ids))

    def request(self, bridge: Bridge, snapshot: KVSnapshot, plan: RepairPlan) -> Request:
        """What the stages start from."""
        return bridge.request(snapshot, self.item.prompt, repair=plan)
