"""Text goes on: the next 48 tokens after about 192, by likelihood. Scored as recovery and KL."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.errors import EvalError
from kvbridge.eval.items import Item, RawItem
from kvbridge.eval.start import Start
from kvbridge.eval.tasks.base import Scored, following_ids, likelihood
from kvbridge.models import Model


@dataclass(frozen=True)
class Continuation:
    """Cuts each text at word boundaries near `context` and `context + continuation` of the receiver's tokens."""

    context: int = 192
    continuation: int = 48
    name: str = "continuation"

    def item(self, raw: RawItem, receiver: Model) -> Item:
        """The text's beginning and what follows it; EvalError where the text is too short."""
        text = raw.body.get("text")
        if not isinstance(text, str):
            raise EvalError(f"{raw.id}: expected a text, found columns {', '.join(raw.body)}")
        spans = receiver.encode(text).spans
        if len(spans) < self.context + self.continuation:
            raise EvalError(
                f"{raw.id}: {len(spans)} tokens, a continuation item needs {self.context + self.continuation}"
            )
        start = _word_boundary(text, int(spans[self.context, 1]))
        end = _word_boundary(text, int(spans[self.context + self.continuation - 1, 1]))
        if not 0 < start < end:
            raise EvalError(f"{raw.id}: no word boundary near token {self.context}")
        return Item(
            raw.id, raw.document, self.name, text[:start], (text[start:end],), conversation=raw.body.get("conversation")
        )

    def score(self, item: Item, start: Start) -> Scored:
        """Nats over the continuation."""
        answer = item.answers[0]
        found = likelihood(start, following_ids(start.model, item.prompt, answer), len(answer))
        return Scored(found.loss, found.tokens, found.characters, None, None, found.distribution)


def _word_boundary(text: str, at: int) -> int:
    """Index of the last single space at or before `at` with a letter on each side: both tokenizers break there."""
    for i in range(min(at, len(text) - 2), 0, -1):
        if text[i] == " " and text[i - 1].isalnum() and text[i + 1].isalnum():
            return i
    return 0
