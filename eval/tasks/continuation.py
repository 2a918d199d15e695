"""Text goes on: the next 48 tokens after about 192, by likelihood. Scored as recovery and KL."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvbridge.errors import EvalError
from kvbridge.eval.tasks.base import MetricName, Scored, following_ids, likelihood
from kvbridge.eval.tasks.items import Item, RawItem, asks, chance_of, conversation_of
from kvbridge.eval.tasks.start import Start
from kvbridge.model.model import Model


@dataclass(frozen=True)
class Continuation:
    """Cuts each text into windows of `context + continuation` of the receiver's tokens, at most
    `windows` of them, each at word boundaries; a later window's context starts afresh."""

    context: int = 192
    continuation: int = 48
    windows: int = 2
    name: str = "continuation"
    label: str = "Continuation"
    metric: MetricName = "loss"

    def takes(self, body: dict[str, Any]) -> bool:
        """A text that asks nothing."""
        return isinstance(body.get("text"), str) and not asks(body)

    def items(self, raw: RawItem, receiver: Model) -> list[Item]:
        """The beginning of each window and what follows it; EvalError where the text is too short
        for one."""
        text, chance = raw.body.get("text"), chance_of(raw)
        if not isinstance(text, str):
            raise EvalError(f"{raw.id}: expected a text, found columns {', '.join(raw.body)}")
        windows: list[Item] = []
        for number in range(self.windows):
            spans = receiver.encode(text).spans
            if len(spans) < self.context + self.continuation + 1:
                break
            start = _word_boundary(text, int(spans[self.context, 1]))
            end = _word_boundary(text, int(spans[self.context + self.continuation, 1]))
            if not 0 < start < end:
                break
            window = Item(
                raw.id if number == 0 else f"{raw.id}+{number}",
                raw.document,
                self.name,
                text[:start],
                (text[start:end],),
                chance=chance,
                conversation=conversation_of(raw),
            )
            windows.append(window)
            text = text[end + 1 :]
        if not windows:
            tokens = len(receiver.encode(text))
            needed = self.context + self.continuation + 1
            raise EvalError(f"{raw.id}: {tokens} tokens, a continuation item needs {needed}")
        return windows

    def score(self, item: Item, start: Start) -> Scored:
        """Nats over the continuation; that greedy decoding gives all of it says nothing."""
        answer = item.answers[0]
        scored = likelihood(start, following_ids(start.model, item.prompt, answer), len(answer))
        return replace(scored, correct=None)


def _word_boundary(text: str, at: int) -> int:
    """Index of the last single space at or before `at` with a letter on each side: both tokenizers
    break there."""
    for i in range(min(at, len(text) - 2), 0, -1):
        if text[i] == " " and text[i - 1].isalnum() and text[i + 1].isalnum():
            return i
    return 0
