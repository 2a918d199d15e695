"""The handoff: a sender's snapshot in, the receiver's cache out, or a reason to prefill."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvbridge.asset.folder import Asset
from kvbridge.asset.maps.translator import Translator
from kvbridge.cache.align import MIN_EXACT_SHARE
from kvbridge.cache.provenance import Decision, Provenance, discard, exact_provenance, spans_of
from kvbridge.cache.snapshot import KVSnapshot, LayerKV
from kvbridge.errors import UsageError
from kvbridge.handoff.check import check_models
from kvbridge.handoff.cost import handoff_parts
from kvbridge.handoff.evidence import Evidence, Gate, Ledger, NotingGate
from kvbridge.handoff.repair import RepairPlan, fidelity_map, recompute
from kvbridge.handoff.request import Request, prepare
from kvbridge.handoff.result import Handoff
from kvbridge.model.attention import Queries, recorded_queries
from kvbridge.model.load import Encoding, Model


class Bridge:
    """Hands conversations from `sender` to `receiver` with one translator.

    `asset` is a loaded Asset or a Translator; None when both models are the same or share all layers, so that nothing
    is translated. `gate` decides per request (None: every translation is `use_approximate`); a NotingGate also hears of what
    is decided without it. `ledger` leases bytes.
    Nothing about a request raises: it is a Decision(discard) and the handoff is a dense prefill. Misuse raises
    UsageError.
    """

    def __init__(
        self,
        asset: Asset | Translator | None,
        *,
        sender: Model,
        receiver: Model,
        gate: Gate | None = None,
        ledger: Ledger | None = None,
        min_exact_share: float = MIN_EXACT_SHARE,
    ) -> None:
        if not isinstance(sender, Model) or not isinstance(receiver, Model):
            raise UsageError("expected sender= and receiver= as made by kvbridge.load")
        if asset is not None and not isinstance(asset, (Asset, Translator)):
            raise UsageError(
                f"expected an asset of kvbridge.load_asset or a translator, found {type(asset).__name__}"
            )
        self.asset = asset if isinstance(asset, Asset) else None
        translator = asset.translator if isinstance(asset, Asset) else asset
        self.translator = None if translator is None else translator.to(receiver.device)
        self.sender, self.receiver, self.gate, self.ledger = sender, receiver, gate, ledger
        self.min_exact_share = min_exact_share

    def handoff(
        self,
        snapshot: KVSnapshot,
        text: str | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        input_ids: Tensor | None = None,
        repair: RepairPlan | None = None,
    ) -> Handoff:
        """Hands over one request; exactly one of text, messages (the receiver's chat template) and input_ids (the
        receiver's tokens) says what the receiver is to continue.

        The snapshot must be of this text or of its beginning: what it leaves out is recomputed. It is not modified.
        """
        return self._run(
            [(snapshot, *self._prompt(text, messages, input_ids))], repair or RepairPlan()
        )[0]

    def handoff_many(
        self, requests: Sequence[tuple[KVSnapshot, str]], *, repair: RepairPlan | None = None
    ) -> list[Handoff]:
        """Hands over several requests of any lengths; their tokens go through the maps together."""
        return self._run(
            [(s, text, self.receiver.encode(text)) for s, text in requests], repair or RepairPlan()
        )

    @torch.no_grad()
    def _run(
        self, requests: list[tuple[KVSnapshot, str, Encoding]], plan: RepairPlan
    ) -> list[Handoff]:
        if plan.layers >= len(self.receiver.layers):
            raise UsageError(
                f"repairing {plan.layers} of {len(self.receiver.layers)} layers is a prefill; choose fewer"
            )
        prepared: list[Request | Handoff] = []
        changed = check_models(self.sender, self.receiver)
        for snapshot, text, encoding in requests:
            request = changed or prepare(
                snapshot,
                text,
                encoding,
                plan,
                self.sender,
                self.receiver,
                self.translator,
                self.min_exact_share,
            )
            prepared.append(
                self._refuse(request, snapshot, encoding, plan)
                if isinstance(request, Decision)
                else request
            )
        ready = [request for request in prepared if isinstance(request, Request)]
        if ready and self.ledger is not None and self.asset is not None:
            lease = self.ledger.lease(self.asset)
            if lease is None:
                refusal = discard(
                    "no_room", f"no room for {self.asset.manifest.weights_bytes} bytes"
                )
                return [
                    self._refuse(refusal, r.snapshot, r.encoding, plan)
                    if isinstance(r, Request)
                    else r
                    for r in prepared
                ]
            with lease:
                done = iter(self._finish(ready, plan))
        else:
            done = iter(self._finish(ready, plan))
        return [next(done) if isinstance(r, Request) else r for r in prepared]

    def _prompt(
        self, text: str | None, messages: list[dict[str, Any]] | None, input_ids: Tensor | None
    ) -> tuple[str, Encoding]:
        """The prompt and its tokens; given tokens are kept as they are, canonical or not."""
        if sum(x is not None for x in (text, messages, input_ids)) != 1:
            raise UsageError("expected exactly one of text, messages and input_ids")
        if input_ids is not None:
            return self.receiver.encode_ids(input_ids)
        text = self.receiver.render(messages) if messages is not None else text
        assert text is not None
        return text, self.receiver.encode(text)

    def _finish(self, requests: list[Request], plan: RepairPlan) -> list[Handoff]:
        translations = self._translate(requests)
        return [
            self._assemble(request, translated, plan)
            for request, translated in zip(requests, translations, strict=True)
        ]

    def _rows(self, request: Request) -> Tensor:
        """Receiver tokens that are translated: covered ones that are not recomputed, and all covered ones for a gate."""
        wanted = request.alignment.covered.clone()
        if self.gate is None:
            wanted[request.chosen] = False
        return wanted.nonzero()[:, 0]

    def _translate(self, requests: list[Request]) -> list[dict[int, LayerKV]]:
        """Translated rows of each request in content space; the rows of all requests go through the maps at once.
        Requests whose layers are all exact need none.
        """
        total = len(self.receiver.layers)
        done = iter(self._through_maps([r for r in requests if r.exact_layers < total]))
        return [next(done) if r.exact_layers < total else {} for r in requests]

    def _through_maps(self, requests: list[Request]) -> list[dict[int, LayerKV]]:
        if not requests:
            return []
        assert self.translator is not None
        skip = min(r.exact_layers for r in requests)
        device = self.receiver.device
        content: dict[int, LayerKV] = {}
        rows = [self._rows(r) for r in requests]
        for layer in self.translator.sender_layers:
            parts = [
                r.snapshot.content(self.sender.rotation, r.alignment.index[at], layer)
                for r, at in zip(requests, rows, strict=True)
            ]
            content[layer] = {
                name: torch.cat([p[name].to(device) for p in parts]) for name in parts[0]
            }
        features = None
        if all(r.feature is not None for r in requests):
            features = torch.cat(
                [
                    r.feature[at.to(device)]  # type: ignore[index]
                    for r, at in zip(requests, rows, strict=True)
                ]
            )
        out = self.translator(content, features, skip_layers=skip)
        counts = [len(at) for at in rows]
        pieces = {
            layer: {name: t.split(counts) for name, t in streams.items()}
            for layer, streams in out.items()
        }
        return [
            {
                layer: {name: split[i] for name, split in streams.items()}
                for layer, streams in pieces.items()
            }
            for i in range(len(requests))
        ]

    def _assemble(
        self, request: Request, translated: dict[int, LayerKV], plan: RepairPlan
    ) -> Handoff:
        """Exact layers, translated rows rotated for the receiver, recomputed tokens, then the gate."""
        receiver, rows = self.receiver, self._rows(request)
        cache = [self._empty(layer, request.cached) for layer in range(len(receiver.layers))]
        at = rows.to(receiver.device)
        for layer, streams in translated.items():
            for name, tensor in streams.items():
                value = receiver.rotation.rotate(tensor, rows, layer) if name == "k" else tensor
                if not bool(torch.isfinite(value).all()):
                    refusal = discard("not_finite", f"layer {layer} {name} of the translation")
                    return self._refuse(refusal, request.snapshot, request.encoding, plan)
                cache[layer][name][at] = value.to(receiver.dtype)
        self._fill_exact(request, cache)
        before = (
            [{name: t.clone() for name, t in layer.items()} for layer in cache]
            if self.gate is not None
            else cache
        )
        ids, last = request.encoding.ids[: request.cached], request.encoding.ids[request.cached :]
        with (
            nullcontext(Queries(receiver))
            if self.gate is None
            else recorded_queries(receiver) as queries
        ):
            states = recompute(
                receiver, ids, cache, request.chosen, following=None if self.gate is None else last
            )
        self._fill_exact(request, cache)
        if not all(bool(torch.isfinite(t).all()) for layer in cache for t in layer.values()):
            refusal = discard("not_finite", "the cache after repair")
            return self._refuse(refusal, request.snapshot, request.encoding, plan)
        decision = self._decide(request, plan, before, cache, states, queries)
        if not decision.accepted:
            return self._dense(request.encoding, decision)
        return Handoff(
            decision,
            self._provenance(request),
            receiver,
            request.encoding.ids,
            cache,
            request.cached,
        )

    def _fill_exact(self, request: Request, cache: list[LayerKV]) -> None:
        """Layers the receiver computed itself, else those it shares with the sender bit for bit (`cache` is modified).

        Done before a repair, which reads them, and after it: a forward of few tokens rounds otherwise than a prefill.
        """
        computed = request.first.layers if request.first is not None else []
        covered = request.alignment.covered.nonzero()[:, 0]
        at = covered.to(self.receiver.device)
        for layer in range(request.exact_layers):
            for name, target in cache[layer].items():
                if layer < len(computed):
                    target.copy_(computed[layer][name])
                else:
                    target[at] = request.snapshot.layers[layer][name][
                        request.alignment.index[covered]
                    ].to(target)

    def _empty(self, layer: int, cached: int) -> LayerKV:
        streams = self.receiver.geometry.layers[layer].streams
        return {
            s.name: torch.zeros(
                (cached, s.heads, s.width), dtype=self.receiver.dtype, device=self.receiver.device
            )
            for s in streams
        }

    def _decide(
        self,
        request: Request,
        plan: RepairPlan,
        before: list[LayerKV],
        cache: list[LayerKV],
        states: Tensor | None,
        queries: Queries,
    ) -> Decision:
        parts = self._parts(request)
        flops = sum(parts.values())
        if request.exact_layers >= len(cache):
            exact = Decision("use", "exact", predicted_flops=flops)
            return self._noted(exact, request.snapshot, request.encoding, plan)
        if self.gate is None:
            return Decision("use_approximate", "ungated", predicted_flops=flops)
        assert states is not None
        decision = self.gate.decide(
            Evidence(
                self.sender,
                self.receiver,
                self.asset,
                request.snapshot,
                request.text,
                request.encoding.ids,
                plan,
                request.chosen,
                before,
                cache,
                request.feature,
                request.alignment,
                parts,
                states,
                request.exact_layers,
                request.encoding.spans,
                queries,
            )
        )
        return (
            decision
            if decision.predicted_flops is not None
            else replace(decision, predicted_flops=flops)
        )

    def _parts(self, request: Request) -> dict[str, int]:
        parameters = self.translator.parameters if self.translator is not None else 0
        return handoff_parts(
            self.receiver.geometry,
            len(request.encoding),
            translator_parameters=parameters
            if request.exact_layers < len(self.receiver.layers)
            else 0,
            translated=len(self._rows(request)),
            first_layers=len(request.first.layers) if request.first is not None else 0,
            recomputed=len(request.chosen),
        )

    def _provenance(self, request: Request) -> Provenance:
        matrix = fidelity_map(
            len(self.receiver.layers), request.cached, request.exact_layers, request.chosen
        )
        digest = None if self.asset is None else self.asset.digest
        depth = (
            0
            if request.exact_layers >= len(self.receiver.layers)
            else request.snapshot.provenance.depth + 1
        )
        return Provenance(
            self.sender.geometry.digest,
            self.receiver.geometry.digest,
            digest,
            depth,
            spans_of(matrix),
        )

    def _noted(
        self, decision: Decision, snapshot: KVSnapshot, encoding: Encoding, plan: RepairPlan
    ) -> Decision:
        """A decision that the gate had no part in, after the gate took note of it where it does."""
        if not isinstance(self.gate, NotingGate):
            return decision
        found = self.gate.note(decision, snapshot, encoding.ids, plan)
        if found.accepted and not decision.accepted:
            raise UsageError(
                f"expected a gate's note to keep the refusal {decision.reason}, found {found.verdict}"
            )
        return found

    def _refuse(
        self, refusal: Decision, snapshot: KVSnapshot, encoding: Encoding, plan: RepairPlan
    ) -> Handoff:
        return self._dense(encoding, self._noted(refusal, snapshot, encoding, plan))

    def _dense(self, encoding: Encoding, decision: Decision) -> Handoff:
        provenance = exact_provenance(self.receiver.geometry.digest, len(self.receiver.layers), 0)
        return Handoff(decision, provenance, self.receiver, encoding.ids, None, 0)
