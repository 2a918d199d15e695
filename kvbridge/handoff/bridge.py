"""The handoff: a sender's snapshot in, the receiver's cache out, or a reason to prefill."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from kvbridge.asset.folder import Asset
from kvbridge.asset.maps.translator import Translator
from kvbridge.cache.align import MIN_EXACT_SHARE
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.engines.port import Engine
from kvbridge.errors import UsageError
from kvbridge.handoff import stages
from kvbridge.handoff.pair import Pair, TemplateTokens
from kvbridge.handoff.plan import RepairPlan
from kvbridge.handoff.ports import Gate, Ledger, Resident
from kvbridge.handoff.request import Request
from kvbridge.handoff.result import Handoff
from kvbridge.model.arguments import (
    check_vocabulary,
    expect,
    found_in,
    no_autocast,
    text_of,
    token_ids,
)
from kvbridge.model.chat import Messages, TemplateOptions
from kvbridge.model.model import Model
from kvbridge.model.passages import Passage


class Bridge:
    """Hands conversations from `sender` to `receiver` with one translator.

    `asset` is a loaded Asset or a Translator; None when both models are the same or share all
    layers, so that nothing is translated. `gate` decides per request (None: every translation is
    `use_approximate`); a NotingGate also hears of what is decided without it. `ledger` grants the
    translator (None: it is put on the receiver's device when it is first needed, and stays there).
    `template_tokens`: the receiver's template tokens in a chat that the sender read under another
    template are translated from the sender's rows next to them, or recomputed ("recompute").
    Nothing about a request raises: it is a Decision(discard) and the handoff is a dense prefill.
    Misuse raises UsageError.
    """

    def __init__(
        self,
        asset: Asset | Translator | None,
        *,
        sender: Model | Engine,
        receiver: Model | Engine,
        gate: Gate | None = None,
        ledger: Ledger | None = None,
        min_exact_share: float = MIN_EXACT_SHARE,
        template_tokens: TemplateTokens = "translate",
    ) -> None:
        self.pair = Pair.of(asset, sender, receiver, min_exact_share, template_tokens)
        self.gate = gate
        self.resident = Resident(self.pair.receiver, ledger)

    @property
    def sender(self) -> Any:
        """The model or engine that hands over."""
        return self.pair.sender.model

    @property
    def receiver(self) -> Any:
        """The model or engine that takes over."""
        return self.pair.receiver.model

    @property
    def asset(self) -> Asset | None:
        """The asset; None for a bare translator or none."""
        return self.pair.asset

    @property
    def translator(self) -> Translator | None:
        """The translator as it was loaded, wherever that is."""
        return self.pair.translator

    @property
    def min_exact_share(self) -> float:
        """Share of the receiver's tokens that must end where a sender's does."""
        return self.pair.min_exact_share

    def handoff(
        self,
        snapshot: KVSnapshot,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        template: TemplateOptions | None = None,
        input_ids: Tensor | None = None,
        repair: RepairPlan | None = None,
        known: KVSnapshot | None = None,
    ) -> Handoff:
        """Hands over one request; exactly one of text, messages (the receiver's chat template, with
        `template` as of `capture`) and input_ids (the receiver's tokens) says what the receiver is
        to continue.

        The snapshot must be of this text, of its beginning, or of one that begins alike; of a chat,
        of the same messages, whatever its template: what it leaves out is recomputed.
        `known` is what the receiver has already, its own snapshot of the prompt's beginning: those
        rows are taken as they are, and only what follows is handed over. Neither is modified.
        """
        request = self.request(
            snapshot,
            text,
            messages=messages,
            template=template,
            input_ids=input_ids,
            repair=repair,
            known=known,
        )
        return self.finish(self.prepare([request]))[0]

    def handoff_many(
        self, requests: Sequence[tuple[KVSnapshot, str]], *, repair: RepairPlan | None = None
    ) -> list[Handoff]:
        """Hands over several requests of any lengths; their tokens go through the maps together."""
        for request in expect(requests, Sequence, "a list of snapshots with their texts"):
            if not isinstance(request, (tuple, list)) or len(request) != 2:
                raise UsageError(
                    f"expected a snapshot and its text for each request, found {found_in(request)}"
                )
        prepared = self.prepare(
            [self.request(snapshot, text, repair=repair) for snapshot, text in requests]
        )
        return self.finish(prepared)

    def request(
        self,
        snapshot: KVSnapshot,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        template: TemplateOptions | None = None,
        input_ids: Tensor | None = None,
        repair: RepairPlan | None = None,
        known: KVSnapshot | None = None,
    ) -> Request:
        """The state that the stages start from; arguments as of `handoff`. It is observed where
        this bridge has a gate."""
        if sum(x is not None for x in (text, messages, input_ids)) != 1:
            raise UsageError("expected exactly one of text, messages and input_ids")
        expect(snapshot, KVSnapshot, "a snapshot, as kvbridge.capture makes it")
        expect(known, (KVSnapshot, NoneType), "a snapshot as known=")
        expect(repair, (RepairPlan, NoneType), "a RepairPlan as repair=")
        if template is not None and messages is None:
            raise UsageError("template= says how messages= are rendered; give both or neither")
        receiver = self.pair.receiver
        no_autocast(receiver.device)
        vocabulary = receiver.geometry.vocabulary
        passages: tuple[Passage, ...] = ()
        if input_ids is not None:
            # Given tokens are kept as they are, canonical or not.
            text, encoding = receiver.encode_ids(token_ids(input_ids, vocabulary))
        elif messages is not None:
            chat = receiver.chat(messages, template)
            text, encoding, passages = chat.text, chat.encoding, chat.passages
        else:
            text = text_of(text)
            encoding = receiver.encode(text)
        check_vocabulary(encoding.ids, vocabulary, receiver.name)
        return Request(
            snapshot,
            text,
            encoding,
            repair or RepairPlan(),
            known,
            observed=self.gate is not None,
            passages=passages,
        )

    @torch.no_grad()
    def prepare(self, requests: Sequence[Request]) -> list[Request]:
        """Everything up to the translated cache: the same for all plans of a request that differ
        only in the tokens they choose (`stages.replan`)."""
        requests = stages.check(self.pair, requests)
        requests = stages.align(self.pair, requests)
        requests = stages.features(self.pair, requests)
        requests = stages.translate(self.pair, requests, self.resident)
        return stages.rotate(self.pair, requests)

    @torch.no_grad()
    def finish(self, requests: Sequence[Request]) -> list[Handoff]:
        """From translated caches to handoffs, one after the other, so that one repair at a time is
        in memory beside its cache."""
        handoffs = []
        for request in requests:
            repaired = stages.repair(self.pair, [request])
            judged = stages.judge(self.pair, repaired, self.gate)
            handoffs += stages.assemble(self.pair, judged)
        return handoffs
