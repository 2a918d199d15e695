"""What a task does, and likelihood scoring that several share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from kvbridge.errors import EvalError
from kvbridge.eval.tasks.items import Item, RawItem
from kvbridge.eval.tasks.start import Start
from kvbridge.model.model import Model
from kvbridge.model.text import Encoding

LINE_END = "\n"
"""What an answer is tokenised behind when it must not be joined with its prompt: a beginning of a
text would get a space from some tokenizers."""
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


@runtime_checkable
class CutsText(Protocol):
    """A task that cuts texts, and asks where both models' tokens end."""

    def cut_items(self, raw: RawItem, sender: Model, receiver: Model) -> list[Item]:
        """As `Task.items`."""
        ...


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
    """The model's tokens of `answer` after `prompt`, `[tokens]`.

    As in the whole text, where a token ends with the prompt. Where its tokenizer would join the two
    (a space at the prompt's end and the word after it), the prompt stays as it is given, as it does
    when a model generates after it: the answer's own tokens follow. Raises EvalError where none
    spell exactly the answer there.
    """
    before = model.encode(prompt)
    ids = joined_ids(model, before, prompt + answer)
    if ids is not None:
        return ids
    start = model.encode(LINE_END)
    alone = joined_ids(model, start, LINE_END + answer)
    if alone is not None:
        text, _ = model.encode_ids(torch.cat((before.ids, alone)))
        if text.endswith(prompt + answer):
            return alone
    raise EvalError(
        f"{model.name}: no token ends where the prompt does (…{prompt[-12:]!r} + {answer[:12]!r}…)"
    )


def joined_ids(model: Model, before: Encoding, whole: str) -> Tensor | None:
    """Tokens of `whole` behind those of `before`, its beginning, `[tokens]`; None where its
    tokenizer cuts that beginning otherwise."""
    ids = model.encode(whole).ids
    count = len(before)
    if len(ids) <= count or not torch.equal(ids[:count], before.ids):
        return None
    return ids[count:]


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
