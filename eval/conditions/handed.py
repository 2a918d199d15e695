"""How the receiver goes on from a handoff; what several tails share is translated once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.clock import Stopwatch
from kvbridge.errors import EvalError
from kvbridge.eval.conditions.prompt import Prepared, Prompt
from kvbridge.eval.tasks.start import Start, forward
from kvbridge.handoff import stages
from kvbridge.handoff.bridge import Bridge
from kvbridge.handoff.plan import RepairPlan
from kvbridge.handoff.request import Request
from kvbridge.handoff.result import Handoff

Stage = Callable[[Sequence[Request]], list[Request]]


@torch.no_grad()
def handed(prompt: Prompt, bridge: Bridge, snapshot: KVSnapshot, tail: int) -> Start:
    """The receiver after a handoff with `tail` recomputed tokens.

    Its milliseconds are those of every stage that it needs alone, also of those that ran for
    another tail. Raises EvalError for a refusal without a gate, unless the repair covers the prompt
    whole: then it is a prefill.
    """
    prepared = _prepared(prompt, bridge, snapshot, replace(prompt.setup.plan, tail=tail))
    watch = Stopwatch(prompt.setup.receiver.device)
    (handoff,) = bridge.finish([prepared.request])
    decision = handoff.decision
    if not decision.accepted and bridge.gate is None and decision.reason != "too_short":
        raise EvalError(f"{prompt.item.id}: {decision}")
    start = went_on(prompt, handoff, watch, tail)
    start.ttft_ms += sum(prepared.stages_ms.values())
    return start


@torch.no_grad()
def went_on(prompt: Prompt, handoff: Handoff, watch: Stopwatch, tail: int) -> Start:
    """The receiver after `handoff`, its first logits computed; `watch` runs since the handoff
    began, `tail` is how many tokens it recomputed."""
    receiver, cache, decision = prompt.setup.receiver, handoff.cache, handoff.decision
    logits = forward(receiver, handoff.remaining_ids, cache, handoff.cached, keep=1)[0, -1].float()
    # A refused request is prefilled, and what was spent on it before comes on top.
    dense = 0.0 if decision.accepted else 1.0
    share = (decision.predicted_flops or 0) / prompt.prefill_flops + dense
    return Start(
        receiver,
        logits,
        cache,
        len(prompt.ids),
        watch.ms(),
        share,
        decision.verdict,
        decision.score,
        decision.reason,
        tail=tail,
    )


def _prepared(prompt: Prompt, bridge: Bridge, snapshot: KVSnapshot, plan: RepairPlan) -> Prepared:
    """The request up to its translated cache; of an earlier tail's everything that `plan` leaves as
    it was."""
    pair, key = bridge.pair, (bridge, snapshot)
    before = prompt.prepared.get(key)
    if before is None:
        request = prompt.request(bridge, snapshot, plan)
    else:
        request = stages.replan(pair, before.request, plan)
    line: dict[str, Stage] = {
        "check": lambda requests: stages.check(pair, requests),
        "align": lambda requests: stages.align(pair, requests),
        "features": lambda requests: stages.features(pair, requests),
        "translate": lambda requests: stages.translate(pair, requests, bridge.resident),
        "rotate": lambda requests: stages.rotate(pair, requests),
    }
    kept = _stages_kept(request)
    stages_ms: dict[str, float] = {}
    for name, stage in line.items():
        watch = Stopwatch(prompt.setup.receiver.device)
        (request,) = stage([request])
        spent = watch.ms()
        stages_ms[name] = before.stages_ms[name] if before and name in kept else spent
    prompt.prepared[key] = Prepared(request, stages_ms)
    return prompt.prepared[key]


def _stages_kept(request: Request) -> set[str]:
    """Stages whose work a request brings along."""
    kept = set()
    if request.aligned is not None:
        kept |= {"check", "align"}
    if request.features is not None:
        kept.add("features")
    if request.rotated is not None:
        kept |= {"translate", "rotate"}
    return kept
