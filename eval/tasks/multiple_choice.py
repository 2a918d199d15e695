"""The likeliest of several given answers, by nats per character."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from kvbridge.errors import EvalError
from kvbridge.eval.tasks.base import MetricName, Scored, following_ids, likelihood
from kvbridge.eval.tasks.items import Item, RawItem, options_of, question_item
from kvbridge.eval.tasks.start import Start
from kvbridge.model.model import Model


@dataclass(frozen=True)
class MultipleChoice:
    """Options and the right one: `answer` as text, or `label` as its index."""

    name: str = "multiple_choice"
    label: str = "Multiple choice"
    metric: MetricName = "correct"

    def takes(self, body: dict[str, Any]) -> bool:
        """Options without an answer as text. With one a row is recall, as the demo's rows are;
        `"task": "multiple_choice"` has its options scored."""
        answered = body.get("answers") or body.get("answer") is not None
        return bool(body.get("options")) and not answered

    def items(self, raw: RawItem, receiver: Model) -> list[Item]:
        """Raises EvalError for labels out of range, repeated options, or an answer that is not
        among them."""
        item = question_item(raw, self.name, options_of(raw))
        if item.answers[0] not in item.options:
            raise EvalError(
                f"{raw.id}: the answer {item.answers[0]!r:.60} is not among the options"
            )
        return [replace(item, answers=item.answers[:1])]

    def score(self, item: Item, start: Start) -> Scored:
        """Right when the answer has the least nats per character (ties: the earlier option); nats
        of the answer."""
        scored: dict[str, Scored] = {}
        rates: dict[str, float] = {}
        for option in item.options:
            ids = following_ids(start.model, item.prompt, option)
            scored[option] = likelihood(start, ids, len(option))
            rates[option] = (scored[option].loss or 0.0) / max(1, len(option))
        best, answer = min(item.options, key=rates.__getitem__), item.answers[0]
        own = scored[answer]
        # min() would pass a NaN over: NaN for any option is NaN for the item, whose row is left
        # out.
        loss = math.nan if any(math.isnan(rate) for rate in rates.values()) else own.loss
        return replace(own, loss=loss, correct=int(best == answer))
