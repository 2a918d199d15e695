"""A short answer is generated: exact match and F1 against the best of the accepted answers (SQuAD,
arXiv 1606.05250)."""

from __future__ import annotations

import re
import string
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from kvbridge.eval.tasks.base import MetricName, Scored, following_ids, likelihood
from kvbridge.eval.tasks.items import Item, RawItem, question_item
from kvbridge.eval.tasks.start import Start
from kvbridge.model.model import Model


@dataclass(frozen=True)
class QuestionAnswering:
    """Greedy generation of at most `tokens` tokens, cut at the first line end."""

    tokens: int = 16
    name: str = "qa"
    label: str = "QA"
    metric: MetricName = "correct"

    def takes(self, body: dict[str, Any]) -> bool:
        """Several accepted answers."""
        return bool(body.get("answers"))

    def items(self, raw: RawItem, receiver: Model) -> list[Item]:
        """From context, question and answers; raises EvalError where one is missing."""
        return [question_item(raw, self.name)]

    def score(self, item: Item, start: Start) -> Scored:
        """Exact match and F1 of the generated line; nats of the first accepted answer."""
        text = start.model.tokenizer.decode(start.greedy(self.tokens), skip_special_tokens=True)
        said = text.strip().partition("\n")[0]
        first = item.answers[0]
        own = likelihood(start, following_ids(start.model, item.prompt, first), len(first))
        exact = any(normalise(said) == normalise(answer) for answer in item.answers)
        best = max(f1(said, answer) for answer in item.answers)
        return replace(own, correct=int(exact), f1=best)


def normalise(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def f1(said: str, answer: str) -> float:
    """Harmonic mean of precision and recall over normalised words."""
    given, right = normalise(said).split(), normalise(answer).split()
    shared = sum((Counter(given) & Counter(right)).values())
    if not shared:
        return float(given == right)
    return 2 * shared / (len(given) + len(right))
