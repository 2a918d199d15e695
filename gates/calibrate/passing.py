"""The pass over calibration texts: each is read once by both models, then handed over at several
places.

A text's cache at a place is the beginning of its whole cache (attention is causal), so several
prompts cost one capture of each model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbridge.cache.prefill import capture
from kvbridge.cache.provenance import exact_provenance
from kvbridge.cache.snapshot import KVSnapshot, LayerKV
from kvbridge.gates.labels.outcomes import FOLLOWING, Outcome, Pending, compare
from kvbridge.geometry import digest_text
from kvbridge.handoff.bridge import Bridge
from kvbridge.handoff.decision import Decision
from kvbridge.handoff.evidence import Evidence
from kvbridge.handoff.plan import RepairPlan
from kvbridge.model.model import Model
from kvbridge.model.text import Encoding

TOGETHER = 32


@dataclass(frozen=True)
class Sample:
    """A text whose prompts end at characters `ends` (ascending); what follows a prompt is known.
    `answer`: the last prompt is followed by an answer to be found, and nothing else is asked."""

    id: str
    document: str
    text: str
    ends: tuple[int, ...]
    answer: bool = False


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt of a sample: the sender's snapshot, the receiver's own cache of all tokens but the
    last, what follows."""

    id: str
    document: str
    text: str
    snapshot: KVSnapshot
    native: list[LayerKV]
    last: int
    following: Tensor
    answer: bool


@dataclass(frozen=True, eq=False)
class Seen:
    """A request, what a gate would see, and what became of it. `evidence` is None where the
    contract refused."""

    request: Request
    evidence: Evidence | None
    outcome: Outcome | None
    refusal: Decision | None = None


def requests_of(
    sample: Sample, sender: Model, receiver: Model, *, native: bool = True
) -> list[Request]:
    """Prompts of a sample; ends where either tokenizer would cut the prompt otherwise are left out.
    Without `native` the receiver does not run, and no outcome can be told."""
    ours, theirs = sender.encode(sample.text), receiver.encode(sample.text)
    usable = []
    for end in sample.ends:
        a, b = sender.encode(sample.text[:end]), receiver.encode(sample.text[:end])
        if _begins(ours, a) and _begins(theirs, b) and len(b) > 1 and len(theirs) > len(b):
            usable.append((end, len(a), len(b)))
    if not usable:
        return []
    _, most_s, most_r = usable[-1]
    whole = capture(sender, input_ids=ours.ids[:most_s])
    layers = capture(receiver, input_ids=theirs.ids[:most_r]).layers if native else ()
    found = []
    for end, s, r in usable:
        text = sample.text[:end]
        snapshot = replace(
            whole,
            token_ids=ours.ids[:s],
            positions=torch.arange(s),
            spans=ours.spans[:s],
            text_digest=digest_text(text),
            characters=end,
            layers=tuple({n: t[:s] for n, t in layer.items()} for layer in whole.layers),
            provenance=exact_provenance(sender.geometry.digest, len(whole.layers), s),
        )
        own = [{n: t[: r - 1] for n, t in layer.items()} for layer in layers]
        following = theirs.ids[r:] if sample.answer else theirs.ids[r : r + FOLLOWING]
        found.append(
            Request(
                f"{sample.id}@{end}",
                sample.document,
                text,
                snapshot,
                own,
                int(theirs.ids[r - 1]),
                following,
                sample.answer,
            )
        )
    return found


def _begins(whole: Encoding, part: Encoding) -> bool:
    return 0 < len(part) <= len(whole) and torch.equal(whole.ids[: len(part)], part.ids)


class Watching:
    """A gate that accepts everything and keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list[Evidence] = []

    def decide(self, evidence: Evidence) -> Decision:
        """Accepts."""
        self.seen.append(evidence)
        return Decision("use_approximate", "ungated", predicted_flops=evidence.predicted_flops)


def watch(
    bridge: Bridge,
    samples: Iterable[Sample],
    plan: RepairPlan,
    *,
    outcomes: bool = True,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Seen]:
    """Hands over every prompt of `samples` with `bridge` (its gate is not asked) and compares with
    the receiver's own cache; in batches, in order."""
    waiting: list[Request] = []
    done = 0
    for sample in samples:
        waiting += requests_of(sample, bridge.sender, bridge.receiver)
        if len(waiting) >= TOGETHER:
            yield from watch_requests(bridge, waiting, plan, outcomes=outcomes)
            done += len(waiting)
            waiting = []
            if progress is not None:
                progress(done)
    yield from watch_requests(bridge, waiting, plan, outcomes=outcomes)


def watch_requests(
    bridge: Bridge, requests: list[Request], plan: RepairPlan, *, outcomes: bool = True
) -> list[Seen]:
    """The same of one batch."""
    if not requests:
        return []
    gate = Watching()
    translator = bridge.asset if bridge.asset is not None else bridge.translator
    watched = Bridge(
        translator,
        sender=bridge.sender,
        receiver=bridge.receiver,
        gate=gate,
        min_exact_share=bridge.min_exact_share,
    )
    handed = watched.handoff_many([(r.snapshot, r.text) for r in requests], repair=plan)
    seen = iter(gate.seen)
    pairs = [
        (r, next(seen) if h.layers is not None and h.decision.reason == "ungated" else None)
        for r, h in zip(requests, handed, strict=True)
    ]
    ready = [
        Pending(r.last, r.native, h.layers, r.following, r.answer)
        for (r, e), h in zip(pairs, handed, strict=True)
        if e is not None and h.layers is not None
    ]
    found = iter(compare(bridge.receiver, ready) if outcomes else [])
    return [
        Seen(
            r,
            e,
            next(found, None) if e is not None else None,
            None if e is not None else h.decision,
        )
        for (r, e), h in zip(pairs, handed, strict=True)
    ]
