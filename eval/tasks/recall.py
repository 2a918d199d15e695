"""A value that stands earlier in the prompt: right when greedy decoding gives exactly the
answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbridge.eval.tasks.base import MetricName, Scored, following_ids, likelihood
from kvbridge.eval.tasks.items import Item, RawItem, question_item
from kvbridge.eval.tasks.start import Start
from kvbridge.model.model import Model


@dataclass(frozen=True)
class Recall:
    """Prompt and answer as they stand; teacher-forced argmax over the answer's tokens is greedy
    exact match."""

    name: str = "recall"
    label: str = "Recall"
    metric: MetricName = "correct"

    def takes(self, body: dict[str, Any]) -> bool:
        """One answer as text."""
        return body.get("answer") is not None and not body.get("answers")

    def items(self, raw: RawItem, receiver: Model) -> list[Item]:
        """From context, question and answer; raises EvalError where one is missing."""
        return [question_item(raw, self.name)]

    def score(self, item: Item, start: Start) -> Scored:
        """Right or wrong, and nats of the answer."""
        answer = item.answers[0]
        return likelihood(start, following_ids(start.model, item.prompt, answer), len(answer))
