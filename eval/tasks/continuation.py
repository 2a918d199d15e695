"""Text goes on: the next 48 tokens after about 192, by likelihood. Scored as recovery and KL."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvbridge.errors import EvalError
from kvbridge.eval.tasks.base import MetricName, Scored, following_ids, likelihood
from kvbridge.eval.tasks.boundaries import shared_boundary, shared_ends, word_boundary
from kvbridge.eval.tasks.items import Item, RawItem, asks, chance_of, conversation_of
from kvbridge.eval.tasks.start import Start
from kvbridge.model.beginning import encode_beginning
from kvbridge.model.model import Model


@dataclass(frozen=True)
class Continuation:
    """Cuts each text into windows of `context + continuation` of the receiver's tokens, at most
    `windows` of them, between words where there are spaces; a later window's context starts
    afresh."""

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
        """As `cut_items`, where the receiver's tokens alone are asked for."""
        return self.cut_items(raw, receiver, receiver)

    def cut_items(self, raw: RawItem, sender: Model, receiver: Model) -> list[Item]:
        """The beginning of each window and what follows it; EvalError where the text is too short
        for one, or is nowhere cut alike by both models."""
        text, chance = raw.body.get("text"), chance_of(raw)
        if not isinstance(text, str):
            raise EvalError(f"{raw.id}: expected a text, found columns {', '.join(raw.body)}")
        needed = self.context + self.continuation + 1
        windows: list[Item] = []
        for number in range(self.windows):
            spans = encode_beginning(receiver, text, needed).spans
            if len(spans) < needed:
                break
            place = self._window(text, spans[:, 1].tolist(), (sender, receiver))
            if place is None:
                break
            start, end = place
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
            text = text[end + 1 :] if text[end] == " " else text[end:]
        if not windows:
            tokens = len(encode_beginning(receiver, text, needed))
            if tokens < needed:
                raise EvalError(f"{raw.id}: {tokens} tokens, a continuation item needs {needed}")
            raise EvalError(
                f"{raw.id}: no place near token {self.context} where a token of both models ends"
            )
        return windows

    def _window(
        self, text: str, ends: list[int], models: tuple[Model, Model]
    ) -> tuple[int, int] | None:
        """Where a window's prompt and its continuation end; None where no place is found.

        A space between words where one is near: a token of every model begins there. Texts without
        such spaces (Chinese, Thai, tight code) are cut where a token of both models ends.
        """
        last = ends[self.context + self.continuation]
        least = ends[self.context + self.continuation // 2]
        end = word_boundary(text, last)
        if end < least:
            end = next(shared_ends(text, last, least, models), 0)
        last, least = ends[self.context], ends[self.context // 2]
        start = word_boundary(text, last)
        if start < least:
            start = shared_boundary(text, last, least, end, models) or 0
        return (start, end) if 0 < start < end else None

    def score(self, item: Item, start: Start) -> Scored:
        """Nats over the continuation; that greedy decoding gives all of it says nothing."""
        answer = item.answers[0]
        scored = likelihood(start, following_ids(start.model, item.prompt, answer), len(answer))
        return replace(scored, correct=None)
