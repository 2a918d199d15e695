"""What a bridge expects of those who decide over its handoffs and hold its translators: a gate and
a ledger; and the ledger that it uses without one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kvbridge.asset.folder import Asset
from kvbridge.asset.maps.translator import Translator
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.engines.port import Engine
from kvbridge.handoff.decision import Decision
from kvbridge.handoff.evidence import Evidence
from kvbridge.handoff.plan import RepairPlan

Lease = AbstractContextManager[Translator | None]
"""Holds a translator while it is entered, and gives it where it may be used: on the receiver's
device. None where the ledger only counts bytes."""
Grant = AbstractContextManager[Translator]
"""A lease that always gives the translator itself."""


class Gate(Protocol):
    """Decides whether one translated cache may be used."""

    def decide(self, evidence: Evidence) -> Decision:
        """A Decision; never raises for a request that is merely bad."""
        ...


@runtime_checkable
class NotingGate(Gate, Protocol):
    """A gate that is told of decisions it had no part in, too: refusals before it, and handoffs
    that are exact throughout."""

    def note(
        self, decision: Decision, snapshot: KVSnapshot, ids: Tensor, plan: RepairPlan
    ) -> Decision:
        """The decision to act on, the same or a refusal; called once per request that `decide`
        never sees. `ids` `[tokens]` are the receiver's."""
        ...


class Ledger(Protocol):
    """Accounts for the bytes of translators in use, and may hold their tensors."""

    def lease(self, asset: Asset) -> Lease | None:
        """A lease of the asset's translator, or None when there is no room."""
        ...


class Resident:
    """Grants translators to one receiver: the first grant puts a translator's tensors on the
    receiver's device, where they are kept; nothing moves before.

    `ledger` is asked first, where there is one and the translator is an asset: it may refuse, and
    may give the translator itself. What it gives is not kept here.
    """

    def __init__(self, receiver: Engine, ledger: Ledger | None = None) -> None:
        self.receiver, self.ledger = receiver, ledger
        self._held: dict[tuple[Translator, torch.device], Translator] = {}
        self._loading = threading.Lock()

    def lease(self, handle: Asset | Translator) -> Grant | None:
        """A grant of `handle`'s translator; None where the ledger has no room for it."""
        if self.ledger is None or isinstance(handle, Translator):
            return self._granted(handle, None)
        lease = self.ledger.lease(handle)
        return None if lease is None else self._granted(handle, lease)

    @contextmanager
    def _granted(self, handle: Asset | Translator, lease: Lease | None) -> Iterator[Translator]:
        translator = handle.translator if isinstance(handle, Asset) else handle
        if lease is None:
            yield self._resident(translator)
            return
        with lease as given:
            yield self._resident(translator) if given is None else given

    def _resident(self, translator: Translator) -> Translator:
        """`translator` on the receiver's device, moved there once."""
        key = (translator, self.receiver.device)
        with self._loading:
            if key not in self._held:
                self._held[key] = translator.to(self.receiver.device)
            return self._held[key]
