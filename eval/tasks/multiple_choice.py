"""The likeliest of several given answers, by nats per character."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvbridge.errors import EvalError
from kvbridge.eval.tasks.base import Scored, following_ids, likelihood
from kvbridge.eval.tasks.items import Item, RawItem, options_of, question_item
from kvbridge.eval.tasks.start import Start
from kvbridge.model.model import Model


@dataclass(frozen=True)
class MultipleChoice:
    """Options and the right one: `answer` as text, or `label` as its index."""

    name: str = "multiple_choice"

    def items(self, raw: RawItem, receiver: Model) -> list[Item]:
        """Raises EvalError for labels out of range, repeated options, or an answer that is not among them."""
        item = question_item(raw, self.name, options_of(raw))
        if item.answers[0] not in item.options:
            raise EvalError(
                f"{raw.id}: the answer {item.answers[0]!r:.60} is not among the options"
            )
        return [replace(item, answers=item.answers[:1])]

    def score(self, item: Item, start: Start) -> Scored:
        """Right when the answer has the least nats per character (ties: the earlier option); nats of the answer.

        NaN for any option is NaN for the item, which leaves its row out: min() would pass it over."""
        found = {
            o: likelihood(start, following_ids(start.model, item.prompt, o), len(o))
            for o in item.options
        }
        rates = {o: (one.loss or 0.0) / max(1, len(o)) for o, one in found.items()}
        best, own = min(item.options, key=rates.__getitem__), found[item.answers[0]]
        if any(math.isnan(rate) for rate in rates.values()):
            own = replace(own, loss=math.nan)
        return Scored(
            own.loss,
            own.tokens,
            own.characters,
            int(best == item.answers[0]),
            None,
            own.distribution,
        )
