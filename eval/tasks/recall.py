"""A value that stands earlier in the prompt: right when greedy decoding gives exactly the answer."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.errors import EvalError
from kvbridge.eval.items import Item, RawItem, prompt_and_answers
from kvbridge.eval.start import Start
from kvbridge.eval.tasks.base import Scored, following_ids, likelihood
from kvbridge.models import Model


@dataclass(frozen=True)
class Recall:
    """Prompt and answer as they stand; teacher-forced argmax over the answer's tokens is greedy exact match."""

    name: str = "recall"

    def items(self, raw: RawItem, receiver: Model) -> list[Item]:
        """From context, question and answer; raises EvalError where one is missing."""
        prompt, answers = prompt_and_answers(raw)
        chance = raw.body.get("chance")
        if chance is not None and not (isinstance(chance, int | float) and 0 <= chance <= 1):
            raise EvalError(f"{raw.id}: expected a chance from 0 to 1, found {chance!r:.40}")
        return [
            Item(
                raw.id,
                raw.document,
                self.name,
                prompt,
                answers,
                chance=None if chance is None else float(chance),
                conversation=raw.body.get("conversation"),
            )
        ]

    def score(self, item: Item, start: Start) -> Scored:
        """Right or wrong, and nats of the answer."""
        answer = item.answers[0]
        return likelihood(start, following_ids(start.model, item.prompt, answer), len(answer))
