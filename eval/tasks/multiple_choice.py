"""The likeliest of several given answers, by nats per character."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.errors import EvalError
from kvbridge.eval.items import Item, RawItem, prompt_and_answers
from kvbridge.eval.start import Start
from kvbridge.eval.tasks.base import Scored, following_ids, likelihood
from kvbridge.models import Model


@dataclass(frozen=True)
class MultipleChoice:
    """Options and the right one: `answer` as text, or `label` as its index."""

    name: str = "multiple_choice"

    def items(self, raw: RawItem, receiver: Model) -> list[Item]:
        """Raises EvalError for labels out of range, repeated options, or an answer that is not among them."""
        options = tuple(raw.body.get("options") or ())
        if len(options) < 2 or not all(isinstance(o, str) and o for o in options) or len(set(options)) != len(options):
            raise EvalError(f"{raw.id}: expected two or more different options, found {options!r:.200}")
        label = raw.body.get("label")
        if raw.body.get("answer") is None and raw.body.get("answers") is None:
            if type(label) is not int or not 0 <= label < len(options):
                raise EvalError(f"{raw.id}: expected a label from 0 to {len(options) - 1}, found {label!r}")
            raw = RawItem(raw.id, raw.document, {**raw.body, "answer": options[label]})
        prompt, answers = prompt_and_answers(raw)
        if answers[0] not in options:
            raise EvalError(f"{raw.id}: the answer {answers[0]!r:.60} is not among the options")
        return [
            Item(
                raw.id,
                raw.document,
                self.name,
                prompt,
                answers[:1],
                options,
                chance=1 / len(options),
                conversation=raw.body.get("conversation"),
            )
        ]

    def score(self, item: Item, start: Start) -> Scored:
        """Right when the answer has the least nats per character (ties: the earlier option); nats of the answer."""
        found = {o: likelihood(start, following_ids(start.model, item.prompt, o), len(o)) for o in item.options}
        best = min(item.options, key=lambda o: (found[o].loss or 0.0) / max(1, len(o)))
        own = found[item.answers[0]]
        return Scored(own.loss, own.tokens, own.characters, int(best == item.answers[0]), None, own.distribution)
