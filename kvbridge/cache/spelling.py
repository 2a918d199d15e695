"""What the ids of a cache spell, from what the caller says of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbridge.errors import UsageError
from kvbridge.model.chat import Chat
from kvbridge.model.model import Model
from kvbridge.model.passages import Passage
from kvbridge.model.text import Encoding


@dataclass(frozen=True, eq=False)
class Spelling:
    """A text, where each of some ids ends in it (`spans` `[tokens, 2]`), and where the messages of
    a chat stand in it."""

    text: str
    spans: Tensor
    passages: tuple[Passage, ...] = ()


@dataclass(frozen=True, eq=False)
class Said:
    """What the caller says that ids spell: a text, a chat, or nothing."""

    text: str | None = None
    chat: Chat | None = None

    def __post_init__(self) -> None:
        if self.text is not None and self.chat is not None:
            raise UsageError("expected text or messages, found both")

    def spelling(self, model: Model, ids: Tensor, cached: int) -> Spelling:
        """Of the first `cached` of ids `[tokens]`. A chat may go on to an answer that was
        generated, whose last token need not be among them. Raises UsageError where the text does
        not tokenise to them."""
        if self.chat is not None:
            if _begins(self.chat.encoding, ids[:cached]):
                spans = self.chat.encoding.spans[:cached]
                return Spelling(self.chat.text, spans, self.chat.passages)
            text, encoding = model.encode_ids(ids)
            return Spelling(text, encoding.spans[:cached], self.chat.passages_in(text))
        if self.text is None:
            text, encoding = model.encode_ids(ids[:cached])
            return Spelling(text, encoding.spans)
        encoding = model.encode(self.text)
        if not _begins(encoding, ids[:cached]):
            raise UsageError(
                "text= does not tokenise to input_ids; leave it out and it is decoded from them"
            )
        return Spelling(self.text, encoding.spans[:cached])


def _begins(encoding: Encoding, ids: Tensor) -> bool:
    """Whether `ids` `[tokens]` are the first of an encoding's."""
    return len(encoding) >= len(ids) and torch.equal(encoding.ids[: len(ids)], ids)
