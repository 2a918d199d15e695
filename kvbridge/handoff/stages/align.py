"""Which sender row each receiver token reads, and which tokens are recomputed instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbridge.cache.align import (
    Alignment,
    align_between,
    align_positions,
    align_spans,
    align_stretches,
)
from kvbridge.geometry import shared_layers
from kvbridge.handoff.common import WORTH
from kvbridge.handoff.cost import forward_flops, handoff_parts
from kvbridge.handoff.decision import Decision, discard
from kvbridge.handoff.pair import Pair
from kvbridge.handoff.plan import RepairPlan
from kvbridge.handoff.request import Aligned, Request, after
from kvbridge.handoff.stages.features import first_layers


def align(pair: Pair, requests: Sequence[Request]) -> list[Request]:
    """Fills in `aligned` over the tokens `[start, cached)`, or refuses: too few tokens that end
    where a sender's does, no translator for what is not shared, nothing left to translate. No
    FLOPs."""
    return [_aligned(pair, r) if r.due(r.aligned) else r for r in requests]


def replan(pair: Pair, request: Request, plan: RepairPlan) -> Request:
    """The request with another plan, back at the stage where that plan first matters: after
    `rotate` where it chooses other tokens, after `align` where it has other layers recomputed or
    asks for rows that were not translated. A refused request starts anew, for another plan may be
    possible.

    The request is not modified. Raises UsageError as `check` does.
    """
    plan.check(len(pair.receiver.geometry.layers))
    fresh = replace(
        request,
        plan=plan,
        refusal=None,
        aligned=None,
        features=None,
        translation=None,
        rotated=None,
        repaired=None,
        decision=None,
    )
    if request.refusal is not None or request.aligned is None:
        return fresh
    aligned = request.aligned
    again = _chosen(pair, fresh, aligned.alignment, aligned.shared_layers)
    if again.refusal is not None or plan.layers != request.plan.layers:
        return again
    again = replace(again, features=request.features)
    translated = request.translation or request.rotated
    if translated is None or not bool(torch.isin(again.rows, translated.rows).all()):
        return again
    return replace(again, translation=request.translation, rotated=request.rotated)


def _aligned(pair: Pair, request: Request) -> Request:
    cached, start, total = request.cached, request.start, len(pair.receiver.geometry.layers)
    whole, same_tokens = _align_tokens(pair, request)
    covered = whole.covered[:cached].clone()
    covered[:start] = False
    alignment = Alignment(whole.index[:cached], covered, whole.exact_share)
    if start == cached:
        return _chosen(pair, request, alignment, total)
    if request.common is not None and not bool(covered.any()):
        return _too_little(request, "no token of it can be used")
    if alignment.exact_share < pair.min_exact_share:
        share, expected = alignment.exact_share, pair.min_exact_share
        refusal = discard(
            "alignment",
            f"{share:.0%} of the receiver's tokens end where a sender's does, "
            f"expected {expected:.0%}",
        )
        return replace(request, refusal=refusal)
    shared = 0
    if same_tokens:
        shared = shared_layers(request.snapshot.geometry, pair.receiver.geometry)
    return _chosen(pair, request, alignment, shared)


def _chosen(pair: Pair, request: Request, alignment: Alignment, shared: int) -> Request:
    """The request with `aligned`, or refused where its plan and the translator leave no way."""
    cached, start, total = request.cached, request.start, len(pair.receiver.geometry.layers)
    missing = ~alignment.covered
    chosen = request.plan.chosen(cached, missing)
    chosen = chosen[chosen >= start]
    refusal = None
    if shared < total and pair.translator is None:
        refusal = _without_translator(pair, request)
    elif shared < total and len(chosen) == cached - start:
        refusal = discard(
            "too_short",
            f"all {len(chosen)} tokens before the last would be recomputed: "
            "a prefill does the same",
        )
    elif shared < total and pair.translator is not None and total - 1 not in pair.translator.layers:
        refusal = discard(
            "no_asset", f"this translator leaves out the last layer of {pair.receiver.name}"
        )
    edited = request.common is not None and request.common.edited
    if refusal is not None:
        return _too_little(request, str(refusal)) if edited else replace(request, refusal=refusal)
    done = replace(request, aligned=Aligned(alignment, chosen, shared))
    if edited and (share := _prefill_share(pair, done)) > WORTH:
        return _too_little(
            request, f"it would take {share:.0%} of a prefill's FLOPs, expected {WORTH:.0%} at most"
        )
    return done


def _too_little(request: Request, why: str) -> Request:
    """Refused: what the two texts have alike is not worth a handoff."""
    alike = 0 if request.common is None else request.common.characters
    refusal = discard(
        "text_mismatch",
        f"only {alike} of the snapshot's {request.snapshot.characters} characters are as in this "
        f"text: {why}",
    )
    return replace(request, refusal=refusal)


def _prefill_share(pair: Pair, request: Request) -> float:
    """Predicted FLOPs of an aligned request over those of the receiver's own prefill of what it
    does not know."""
    aligned, geometry = after("align", request.aligned), pair.receiver.geometry
    whole = aligned.shared_layers == len(geometry.layers)
    parts = handoff_parts(
        geometry,
        len(request.encoding),
        translator_flops=0 if whole or pair.translator is None else pair.translator.flops(),
        translated=len(request.rows),
        first_layers=first_layers(pair, request.plan, aligned.shared_layers),
        recomputed=len(aligned.chosen),
        known=request.start,
    )
    unknown = len(request.encoding) - request.start
    prefill = forward_flops(geometry, unknown, request.start, head=True)
    return sum(parts.values()) / prefill


def _without_translator(pair: Pair, request: Request) -> Decision:
    """Why nothing can be handed over without maps."""
    snapshot, own = request.snapshot, pair.receiver.geometry
    moved = int(snapshot.positions[0]) != 0
    if moved and shared_layers(snapshot.geometry, own) == len(own.layers):
        return discard(
            "positions",
            f"the snapshot begins at position {int(snapshot.positions[0])}, the prompt at 0: its "
            "keys would have to be turned, which is not exact",
        )
    return discard("no_asset", f"no translator from {pair.sender.name} to {pair.receiver.name}")


def _align_tokens(pair: Pair, request: Request) -> tuple[Alignment, bool]:
    """Alignment over all tokens, and whether each covered token is the sender's token itself, at
    its own position.

    Equal tokenizers can still differ where the snapshot's text ends or its ids were generated:
    where most tokens then stand elsewhere, spans decide. The share of exact ends is of unknown
    tokens alone.
    """
    snapshot, encoding, common = request.snapshot, request.encoding, request.common
    same_tokenizer = snapshot.geometry.tokenizer_digest == pair.receiver.geometry.tokenizer_digest
    beginning = None if common is None else common.beginning
    if same_tokenizer and (common is None or beginning is not None):
        by_position = align_positions(snapshot.positions, torch.arange(len(encoding)))
        standing = by_position.covered
        if beginning is not None:
            standing = standing & (encoding.spans[:, 1] <= beginning)
        differs = snapshot.token_ids[by_position.index] != encoding.ids
        # Behind a gap in the positions the same token at the same position may still have had
        # other tokens before it: only where its text begins alike were those just left out.
        gapped = snapshot.positions != torch.arange(len(snapshot))
        elsewhere = snapshot.spans[by_position.index, 0] != encoding.spans[:, 0]
        differs |= gapped[by_position.index] & elsewhere
        # A token after one that differs has another context, whatever stands there itself.
        same_so_far = torch.cummin((~(differs & standing)).int(), dim=0).values == 1
        covered = standing & same_so_far
        if bool(covered.any()) and int(covered.sum()) * 2 >= int(standing.sum()):
            return Alignment(by_position.index, covered, by_position.exact_share), True
    start = request.start
    if common is None:
        by_span = align_spans(snapshot.spans, encoding.spans[start:])
    else:
        spans = encoding.spans[start:]
        by_span = align_stretches(snapshot.spans, spans, common.stretches)
        if pair.template_tokens == "translate" and _all_located(request):
            by_span = align_between(
                by_span, _outside(request), len(snapshot), complete=_complete(request)
            )
    index = torch.cat((torch.zeros(start, dtype=torch.int64), by_span.index))
    covered = torch.cat((torch.zeros(start, dtype=torch.bool), by_span.covered))
    return Alignment(index, covered, by_span.exact_share), False


def _all_located(request: Request) -> bool:
    """Whether messages are aligned one by one, and it is known of each where it stands: what else
    there is, the template wrote."""
    passages = (*request.passages, *request.snapshot.passages)
    one_by_one = request.common is not None and request.common.beginning is None
    return one_by_one and all(passage.located for passage in passages)


def _outside(request: Request) -> Tensor:
    """Which of the unknown tokens `[tokens − start]` hold no character of a message."""
    starts, ends = request.encoding.spans[request.start :].unbind(1)
    outside = torch.ones(len(ends), dtype=torch.bool)
    for passage in request.passages:
        outside &= (ends <= passage.start) | (starts >= passage.end)
    return outside


def _complete(request: Request) -> bool:
    """Whether both chats are of the same messages, so that a prompt to answer follows in both."""
    common = request.common
    return (
        common is not None
        and not common.edited
        and len(common.stretches) == len(request.passages) == len(request.snapshot.passages)
    )
