"""What must hold before a request is looked at any closer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvbridge.geometry import difference, digest_text
from kvbridge.handoff.common import Common, common_text
from kvbridge.handoff.decision import Decision, discard
from kvbridge.handoff.pair import Pair
from kvbridge.handoff.request import Request


def check(pair: Pair, requests: Sequence[Request]) -> list[Request]:
    """Refuses requests whose models, snapshot, text or known rows do not belong together; fills in
    `common` where the snapshot is of another text that is alike in part. Costs a look at every weight's counter, once for all requests, and no FLOPs.

    Raises UsageError for a plan that leaves nothing to translate.
    """
    for request in requests:
        request.plan.check(len(pair.receiver.geometry.layers))
    due = any(request.due(request.aligned) for request in requests)
    changed = _check_models(pair) if due else None
    checked = []
    for request in requests:
        if not request.due(request.aligned):
            checked.append(request)
            continue
        refusal = changed or _check_contract(pair, request)
        if refusal is None and not _continues(request):
            common = _common(pair, request)
            request = request if common is None else replace(request, common=common)
            refusal = None if common is not None else _another_text(request)
        refusal = refusal or _check_length(pair, request) or _check_known(pair, request)
        checked.append(request if refusal is None else replace(request, refusal=refusal))
    return checked


def _check_models(pair: Pair) -> Decision | None:
    """Both models are as they were loaded."""
    for role, engine in (("sender", pair.sender), ("receiver", pair.receiver)):
        if what := engine.changed():
            return discard(
                "contract_mismatch",
                f"{role}: its {what} changed since it was loaded; load or wrap it again",
            )
    return None


def _check_contract(pair: Pair, request: Request) -> Decision | None:
    """The snapshot is the sender's own cache, and the translator was fitted for both models exactly
    as loaded."""
    snapshot, sender = request.snapshot, pair.sender.geometry
    if snapshot.geometry.digest != sender.digest:
        return discard(
            "wrong_pair",
            f"the snapshot is of {snapshot.geometry.model_id}, this bridge takes {sender.model_id} "
            f"as it was loaded, which {difference(snapshot.geometry, sender)}",
        )
    origin = snapshot.provenance
    if origin.depth > 0 or origin.fidelity != "exact":
        return discard(
            "lineage",
            f"the snapshot is {origin.fidelity}, {origin.depth} translations deep; "
            "expected a model's own cache",
        )
    if pair.translator is None:
        return None
    for role, fitted, loaded in (
        ("sender", pair.translator.sender, sender),
        ("receiver", pair.translator.receiver, pair.receiver.geometry),
    ):
        if fitted.digest != loaded.digest:
            return discard(
                "contract_mismatch",
                f"{role}: fitted for {fitted.model_id}, found {loaded.model_id}, which "
                f"{difference(fitted, loaded)}",
            )
    return None


def _continues(request: Request) -> bool:
    """Whether the snapshot is of the text or of its beginning."""
    snapshot = request.snapshot
    return digest_text(request.text[: snapshot.characters]) == snapshot.text_digest


def _common(pair: Pair, request: Request) -> Common | None:
    """What the snapshot's text and one that does not go on from it have alike; None for nothing."""
    return common_text(
        pair.sender,
        request.snapshot,
        request.text,
        request.passages,
        translates=pair.translator is not None,
    )


def _another_text(request: Request) -> Decision:
    return discard(
        "text_mismatch",
        f"the snapshot's {request.snapshot.characters} characters are not the beginning of this "
        "text",
    )


def _check_length(pair: Pair, request: Request) -> Decision | None:
    """There is something to hand over, and both models have positions for it."""
    snapshot, encoding = request.snapshot, request.encoding
    if len(snapshot) == 0 or len(encoding) < 2:
        return discard(
            "too_short", f"{len(snapshot)} sender tokens, {len(encoding)} receiver tokens"
        )
    last = int(snapshot.positions[-1])
    for engine, count in ((pair.receiver, len(encoding)), (pair.sender, last + 1)):
        if count > engine.geometry.max_positions:
            return discard(
                "positions_out_of_range",
                f"{count} tokens, {engine.name} has {engine.geometry.max_positions} positions",
            )
    return None


def _check_known(pair: Pair, request: Request) -> Decision | None:
    """What the receiver is said to have is its own cache of the prompt's beginning, without
    holes."""
    known, receiver = request.known, pair.receiver.geometry
    if known is None:
        return None
    if known.geometry.digest != receiver.digest:
        return discard(
            "contract_mismatch",
            f"known: of {known.geometry.model_id}, expected {receiver.model_id} as it was loaded, "
            f"which {difference(known.geometry, receiver)}",
        )
    origin = known.provenance
    if origin.depth > 0 or origin.fidelity != "exact":
        return discard(
            "lineage",
            f"known: {origin.fidelity}, {origin.depth} translations deep; "
            "expected the receiver's own cache",
        )
    count = len(known)
    begins = torch.equal(known.token_ids, request.encoding.ids[:count])
    if not begins or not torch.equal(known.positions, torch.arange(count)):
        return discard(
            "text_mismatch", f"known: its {count} tokens are not the beginning of this prompt"
        )
    return None
