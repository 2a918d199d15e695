"""What a task does, and likelihood scoring that several share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvbridge.errors import EvalError
from kvbridge.eval.tasks.items import Item, RawItem
from kvbridge.eval.tasks.start import Start
from kvbridge.model.model import Model


@dataclass(frozen=True, eq=False)
class Scored:
    """What one condition made of one item; fields as in the rows, plus `distribution` `[tokens, vocabulary]` of log
    probabilities that other conditions are compared with."""

    loss: float | None = None
    tokens: int = 0
    characters: int = 0
    correct: int | None = None
    f1: float | None = None
    distribution: Tensor | None = None


class Task(Protocol):
    """One kind of item."""

    @property
    def name(self) -> str:
        """As in the rows."""
        ...

    def items(self, raw: RawItem, receiver: Model) -> list[Item]:
        """Items out of a raw row, at least one; raises EvalError saying why it cannot be used."""
        ...

    def score(self, item: Item, start: Start) -> Scored:
        """Scores the continuation from `start`, which is not modified."""
        ...


def following_ids(model: Model, prompt: str, answer: str) -> Tensor:
    """The model's tokens of `answer` after `prompt`, `[tokens]`; raises EvalError where no token boundary stands between."""
    whole, before = model.encode(prompt + answer), model.encode(prompt)
    count = len(before)
    if len(whole) <= count or not torch.equal(whole.ids[:count], before.ids):
        raise EvalError(
            f"{model.name}: no token ends where the prompt does (…{prompt[-12:]!r} + {answer[:12]!r}…)"
        )
    return whole.ids[count:]


@torch.no_grad()
def likelihood(start: Start, ids: Tensor, characters: int) -> Scored:
    """Nats of ids `[tokens]`, whether greedy decoding would give exactly them, and the distributions that predict them."""
    logs = start.follow(ids).log_softmax(-1)
    target = ids.to(logs.device)
    nats = -logs.gather(1, target[:, None])[:, 0]
    correct = int(bool((logs.argmax(-1) == target).all()))
    return Scored(float(nats.double().sum()), len(ids), characters, correct, None, logs)


def compare(native: Tensor, other: Tensor) -> tuple[float, float]:
    """Mean KL(native ‖ other) in nats and share of equal argmax over the scored positions, from log probabilities
    `[tokens, vocabulary]`; position by position, so that a large vocabulary stays in the processor's cache. What native
    gives no probability adds nothing; NaN stays NaN, so that no broken distribution passes for an equal one."""
    if native is other:
        return 0.0, 1.0
    divergence = [
        float((p.exp() * (p - q)).where(p != -torch.inf, 0).sum())
        for p, q in zip(native, other, strict=True)
    ]
    agreement = (native.argmax(-1) == other.argmax(-1)).double().mean()
    mean = sum(divergence) / len(divergence)
    return 0.0 if mean < 0 else mean, float(agreement)
