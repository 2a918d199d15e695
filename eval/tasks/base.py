"""What a task does, and likelihood scoring that several share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from kvbridge.errors import EvalError
from kvbridge.eval.tasks.items import Item, RawItem
from kvbridge.eval.tasks.start import Start
from kvbridge.model.model import Model

MetricName = Literal["loss", "correct"]
"""What a task's items are compared by: nats of the answer, or whether the answer was right."""


@dataclass(frozen=True, eq=False)
class Scored:
    """What one condition made of one item; fields as in the rows, plus `distribution`
    `[tokens, vocabulary]` of log probabilities that other conditions are compared with."""

    loss: float | None = None
    tokens: int = 0
    characters: int = 0
    correct: int | None = None
    f1: float | None = None
    distribution: Tensor | None = None


class Task(Protocol):
    """One kind of item.

    `metric` says everything about how it is judged and shown: which column of the rows conditions
    are compared by, in which unit differences are written, whether answers can be gained and lost
    (`kvbridge.eval.statistics.metrics`). Where there are several tasks, the verdict is decided on
    the first that is compared by loss.
    """

    @property
    def name(self) -> str:
        """As in the rows."""
        ...

    @property
    def label(self) -> str:
        """In words, for tables and reports."""
        ...

    @property
    def metric(self) -> MetricName:
        """The column of the rows that items are compared by."""
        ...

    def takes(self, body: dict[str, Any]) -> bool:
        """Whether a row with these columns, which names no task, is one of this task."""
        ...

    def items(self, raw: RawItem, receiver: Model) -> list[Item]:
        """Items out of a raw row, at least one; raises EvalError saying why it cannot be used."""
        ...

    def score(self, item: Item, start: Start) -> Scored:
        """Scores the continuation from `start`, which is not modified."""
        ...


def following_ids(model: Model, prompt: str, answer: str) -> Tensor:
    """The model's tokens of `answer` after `prompt`, `[tokens]`; raises EvalError where no token
    boundary stands between."""
    whole, before = model.encode(prompt + answer), model.encode(prompt)
    count = len(before)
    if len(whole) <= count or not torch.equal(whole.ids[:count], before.ids):
        raise EvalError(
            f"{model.name}: no token ends where the prompt does (…{prompt[-12:]!r} + "
            f"{answer[:12]!r}…)"
        )
    return whole.ids[count:]


@torch.no_grad()
def likelihood(start: Start, ids: Tensor, characters: int) -> Scored:
    """Nats of ids `[tokens]`, whether greedy decoding would give exactly them, and the
    distributions that predict them."""
    logs = start.follow(ids).log_softmax(-1)
    target = ids.to(logs.device)
    nats = -logs.gather(1, target[:, None])[:, 0]
    correct = int(bool((logs.argmax(-1) == target).all()))
    return Scored(float(nats.double().sum()), len(ids), characters, correct, None, logs)


def compare(native: Tensor, other: Tensor) -> tuple[float, float]:
    """Mean KL(native ‖ other) in nats and share of equal argmax over the scored positions, from log
    probabilities `[tokens, vocabulary]`.

    What native gives no probability adds nothing; NaN stays NaN, so that no broken distribution
    passes for an equal one.
    """
    if native is other:
        return 0.0, 1.0
    # Position by position, so that a large vocabulary stays in the processor's cache.
    divergence = [
        float((p.exp() * (p - q)).where(p != -torch.inf, 0).sum())
        for p, q in zip(native, other, strict=True)
    ]
    agreement = (native.argmax(-1) == other.argmax(-1)).double().mean()
    mean = sum(divergence) / len(divergence)
    # Equal distributions may round to just below 0. NaN is not below 0 and is kept.
    return 0.0 if mean < 0 else mean, float(agreement)
