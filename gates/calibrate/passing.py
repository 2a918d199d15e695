"""The pass over calibration texts: each is read once by both models, then handed over at several
places.

A text's cache at a place is the beginning of its whole cache (attention is causal), so several
prompts cost one capture of each model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbridge.cache.prefill import capture
from kvbridge.cache.provenance import exact_provenance
from kvbridge.cache.snapshot import KVSnapshot, LayerKV
from kvbridge.gates.labels.outcomes import FOLLOWING, Outcome, Pending, compare
from kvbridge.geometry import digest_text
from kvbridge.handoff import stages
from kvbridge.handoff.bridge import Bridge
from kvbridge.handoff.decision import Decision
from kvbridge.handoff.evidence import Evidence
from kvbridge.handoff.plan import RepairPlan
from kvbridge.handoff.request import Request, after
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
class CalibrationPrompt:
    """One prompt of a sample: the sender's snapshot, the receiver's own cache of all tokens but the
    last (empty where it was not run), the last token, and what follows (`[tokens]`)."""

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
    """A prompt, what a gate would see of it, and what became of it. `evidence` is None where no
    gate is asked: the contract refused (`refusal`), or every layer is exact."""

    prompt: CalibrationPrompt
    evidence: Evidence | None
    outcome: Outcome | None
    refusal: Decision | None = None


def prompts_of(
    sample: Sample, sender: Model, receiver: Model, *, native: bool = True
) -> list[CalibrationPrompt]:
    """Prompts of a sample; ends where either tokenizer would cut the prompt otherwise are left out.
    Without `native` the receiver does not run, and no outcome can be told."""
    cut_by_sender, cut_by_receiver = sender.encode(sample.text), receiver.encode(sample.text)
    usable = []
    for end in sample.ends:
        a, b = sender.encode(sample.text[:end]), receiver.encode(sample.text[:end])
        begins = _begins(cut_by_sender, a) and _begins(cut_by_receiver, b)
        if begins and 1 < len(b) < len(cut_by_receiver):
            usable.append((end, len(a), len(b)))
    if not usable:
        return []
    _, sender_tokens, receiver_tokens = usable[-1]
    captured = capture(sender, input_ids=cut_by_sender.ids[:sender_tokens])
    whole = replace(captured, spans=cut_by_sender.spans[:sender_tokens])
    layers: Sequence[LayerKV] = ()
    if native:
        layers = capture(receiver, input_ids=cut_by_receiver.ids[:receiver_tokens]).layers
    prompts = []
    for end, a_tokens, b_tokens in usable:
        text, last = sample.text[:end], b_tokens - 1
        following = cut_by_receiver.ids[b_tokens:]
        prompts.append(
            CalibrationPrompt(
                f"{sample.id}@{end}",
                sample.document,
                text,
                _beginning(whole, text, a_tokens),
                [{name: t[:last] for name, t in layer.items()} for layer in layers],
                int(cut_by_receiver.ids[last]),
                following if sample.answer else following[:FOLLOWING],
                sample.answer,
            )
        )
    return prompts


def _begins(whole: Encoding, part: Encoding) -> bool:
    return 0 < len(part) <= len(whole) and torch.equal(whole.ids[: len(part)], part.ids)


def _beginning(whole: KVSnapshot, text: str, tokens: int) -> KVSnapshot:
    """The snapshot of `text`, which the first `tokens` tokens of `whole` spell; views of its
    rows."""
    layers = tuple({name: t[:tokens] for name, t in layer.items()} for layer in whole.layers)
    return replace(
        whole,
        token_ids=whole.token_ids[:tokens],
        positions=torch.arange(tokens),
        spans=whole.spans[:tokens],
        text_digest=digest_text(text),
        characters=len(text),
        layers=layers,
        provenance=exact_provenance(whole.geometry.digest, len(layers), tokens),
    )


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
    waiting: list[CalibrationPrompt] = []
    done = 0
    for sample in samples:
        waiting += prompts_of(sample, bridge.sender, bridge.receiver)
        if len(waiting) >= TOGETHER:
            yield from watch_prompts(bridge, waiting, plan, outcomes=outcomes)
            done += len(waiting)
            waiting = []
            if progress is not None:
                progress(done)
    yield from watch_prompts(bridge, waiting, plan, outcomes=outcomes)


def watch_prompts(
    bridge: Bridge, prompts: Sequence[CalibrationPrompt], plan: RepairPlan, *, outcomes: bool = True
) -> list[Seen]:
    """The same of one batch: through every stage up to the gate's."""
    if not prompts:
        return []
    pair, encode = bridge.pair, bridge.pair.receiver.encode
    asked = [Request(p.snapshot, p.text, encode(p.text), plan, observed=True) for p in prompts]
    judged = stages.judge(pair, stages.repair(pair, bridge.prepare(asked)))
    seen = []
    for prompt, request in zip(prompts, judged, strict=True):
        decision = after("judge", request.decision)
        if decision.reason == "ungated":  # nobody but a gate could have refused it
            seen.append(Seen(prompt, Evidence(pair, request), None))
        else:
            seen.append(Seen(prompt, None, None, decision))
    return _compared(bridge.receiver, seen) if outcomes else seen


def _compared(receiver: Model, seen: Sequence[Seen]) -> list[Seen]:
    """The same with outcomes, where there is evidence."""
    pending = []
    for one in seen:
        if one.evidence is not None:
            prompt, translated = one.prompt, one.evidence.repaired
            pending.append(
                Pending(prompt.last, prompt.native, translated, prompt.following, prompt.answer)
            )
    outcomes = iter(compare(receiver, pending))
    return [one if one.evidence is None else replace(one, outcome=next(outcomes)) for one in seen]
