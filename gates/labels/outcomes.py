"""What became of requests: the receiver's own continuation against that from the translated cache.
Labels read this."""

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
    """`flip`: the next greedy token differs. `diverges`: first of GREEDY greedy tokens that
    differs, GREEDY where none does. `kl`: KL(native ‖ translated) of the next token, in nats.
    `gap`: mean nats per token, translated minus native, of the text that follows. `native_right`,
    `translated_right`: greedy decoding gives the known answer. None: nothing known follows. Logits
    with NaN on either side differ and are not right."""

    flip: bool
    diverges: int
    kl: float
    gap: float | None = None
    native_right: bool | None = None
    translated_right: bool | None = None


@dataclass(frozen=True, eq=False)
class Pending:
    """One request to be compared: the prompt's last token, both caches of what is before it, and
    what follows it (`[tokens]`, may be empty; `answer`: it is the answer to be found)."""

    last: int
    native: list[LayerKV]
    translated: list[LayerKV]
    following: Tensor
    answer: bool = False


@dataclass(frozen=True)
class _Known:
    """One request's text that follows: nats per token and whether greedy decoding gives it, under
    the receiver's own cache and under the translated one."""

    gap: float
    native_right: bool
    translated_right: bool


def compare(receiver: Model, requests: Sequence[Pending]) -> list[Outcome]:
    """Outcomes in order; a handful of forwards for all of them together."""
    if not requests:
        return []
    first = torch.tensor([[r.last] for r in requests])
    native, translated = [r.native for r in requests], [r.translated for r in requests]
    greedy, own = Continuing(receiver, native).greedy(first, GREEDY)
    # The translated cache is fed the receiver's own choices: where it first differs, a loop of its
    # own would, too.
    fed = torch.cat((first, greedy[:, :-1]), dim=1)
    other = followed(receiver, translated, fed)
    broken = other.isnan().any(-1) | own.isnan().any(-1)
    differs = (other.argmax(-1).cpu() != greedy) | broken.cpu()
    # KL ≥ 0; rounding of two equal distributions can leave a little less.
    kl = (own[:, 0].exp() * (own[:, 0] - other[:, 0])).sum(-1).clamp_min(0)
    known = _compare_following(receiver, requests, first)
    outcomes = []
    for row, request in enumerate(requests):
        differing, following = differs[row].nonzero(), known[row]
        asked = following if request.answer else None
        outcomes.append(
            Outcome(
                flip=bool(differs[row, 0]),
                diverges=int(differing[0]) if len(differing) else GREEDY,
                kl=float(kl[row]),
                gap=None if following is None else following.gap,
                native_right=None if asked is None else asked.native_right,
                translated_right=None if asked is None else asked.translated_right,
            )
        )
    return outcomes


def _compare_following(
    receiver: Model, requests: Sequence[Pending], first: Tensor
) -> list[_Known | None]:
    """What both caches make of the text that follows each request; None where nothing does. `first`
    `[requests, 1]`."""
    longest = max(len(r.following) for r in requests)
    if not longest:
        return [None] * len(requests)
    ids = torch.zeros((len(requests), longest), dtype=torch.int64)
    for row, request in enumerate(requests):
        ids[row, : len(request.following)] = request.following
    fed = torch.cat((first, ids[:, :-1]), dim=1)
    native = followed(receiver, [r.native for r in requests], fed).cpu()
    translated = followed(receiver, [r.translated for r in requests], fed).cpu()
    known: list[_Known | None] = []
    for row, request in enumerate(requests):
        count = len(request.following)
        if not count:
            known.append(None)
            continue
        own_nats, own_right = _read_following(native[row, :count], request.following)
        nats, right = _read_following(translated[row, :count], request.following)
        known.append(_Known(nats - own_nats, own_right, right))
    return known


def _read_following(logs: Tensor, following: Tensor) -> tuple[float, bool]:
    """Nats per token of ids `[n]` under log probabilities `[n, vocabulary]`, and whether each is
    the likeliest."""
    nats = -float(logs.gather(1, following[:, None]).mean())
    right = bool((logs.argmax(-1) == following).all()) and not bool(logs.isnan().any())
    return nats, right
