"""What became of requests: the receiver's own continuation against that from the translated cache. Labels read this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbridge.cache.snapshot import LayerKV
from kvbridge.gates.labels.continuing import Continuing, followed
from kvbridge.model.model import Model

GREEDY, FOLLOWING = 4, 16


@dataclass(frozen=True)
class Outcome:
    """`flip`: the next greedy token differs. `diverges`: first of GREEDY greedy tokens that differs, GREEDY where none
    does. `kl`: KL(native ‖ translated) of the next token, in nats. `gap`: mean nats per token, translated minus native,
    of the text that follows. `native_right`, `translated_right`: greedy decoding gives the known answer. None: nothing
    known follows. Logits with NaN on either side differ and are not right."""

    flip: bool
    diverges: int
    kl: float
    gap: float | None = None
    native_right: bool | None = None
    translated_right: bool | None = None


@dataclass(frozen=True, eq=False)
class Pending:
    """One request to be compared: the prompt's last token, both caches of what is before it, and what follows it
    (`[tokens]`, may be empty; `answer`: it is the answer to be found)."""

    last: int
    native: list[LayerKV]
    translated: list[LayerKV]
    following: Tensor
    answer: bool = False


def compare(receiver: Model, requests: Sequence[Pending]) -> list[Outcome]:
    """Outcomes in order; a handful of forwards for all of them together."""
    if not requests:
        return []
    first = torch.tensor([[r.last] for r in requests])
    native, translated = [r.native for r in requests], [r.translated for r in requests]
    greedy, own = Continuing(receiver, native).greedy(first, GREEDY)
    theirs = followed(receiver, translated, torch.cat((first, greedy[:, :-1]), dim=1))
    broken = theirs.isnan().any(-1) | own.isnan().any(-1)
    differs = (theirs.argmax(-1).cpu() != greedy) | broken.cpu()
    kl = (own[:, 0].exp() * (own[:, 0] - theirs[:, 0])).sum(-1).clamp_min(0)
    longest = max(len(r.following) for r in requests)
    known: list[tuple[float, bool, bool] | None] = [None] * len(requests)
    if longest:
        ids = torch.zeros((len(requests), longest), dtype=torch.int64)
        for row, request in enumerate(requests):
            ids[row, : len(request.following)] = request.following
        fed = torch.cat((first, ids[:, :-1]), dim=1)
        logs = [followed(receiver, caches, fed).cpu() for caches in (native, translated)]
        for row, request in enumerate(requests):
            if count := len(request.following):
                target = request.following[:, None]
                nats = [-float(x[row, :count].gather(1, target).mean()) for x in logs]
                right = [
                    bool(
                        (x[row, :count].argmax(-1) == request.following).all()
                        and not x[row, :count].isnan().any()
                    )
                    for x in logs
                ]
                known[row] = (nats[1] - nats[0], right[0], right[1])
    found = []
    for row, request in enumerate(requests):
        at = differs[row].nonzero()
        gap, ours, others = known[row] or (None, None, None)
        found.append(
            Outcome(
                bool(differs[row, 0]),
                int(at[0]) if len(at) else GREEDY,
                float(kl[row]),
                gap,
                ours if request.answer else None,
                others if request.answer else None,
            )
        )
    return found
