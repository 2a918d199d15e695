"""Where a text may be cut for two models: at a space between words, or else where a token of each
ends."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence

from kvbridge.eval.tasks.base import joined_ids
from kvbridge.model.model import Model

AHEAD = 64
"""Characters behind a place that are tokenised with it, so that its own tokens are settled."""
MOST_TRIES = 32
JOINER = "\u200d"
SKIN_TONES = range(0x1F3FB, 0x1F400)
REGIONAL = range(0x1F1E6, 0x1F200)


def word_boundary(text: str, at: int) -> int:
    """Index of the last single space at or before `at` with a letter on each side, 0 where there is
    none: all tokenizers break there."""
    for i in range(min(at, len(text) - 2), 0, -1):
        if text[i] == " " and text[i - 1].isalnum() and text[i + 1].isalnum():
            return i
    return 0


def shared_ends(text: str, at: int, least: int, models: Sequence[Model]) -> Iterator[int]:
    """Indices from `at` down to `least` where a token of every model ends, never inside of what is
    read as one character."""
    shared = set(range(least, at + 1))
    for model in models:
        shared &= set(model.encode(text[: at + AHEAD]).spans[:, 1].tolist())
    for index in sorted(shared, reverse=True):
        if 0 < index < len(text) and not _inside_character(text, index):
            yield index


def shared_boundary(
    text: str, at: int, least: int, end: int, models: Sequence[Model]
) -> int | None:
    """The last index from `at` down to `least` where every model's tokens of `text[:end]` begin
    with those of the text up to there; None where there is none."""
    for tries, index in enumerate(shared_ends(text, at, least, models)):
        if tries == MOST_TRIES:
            break
        if all(_begins(text, index, end, model) for model in models):
            return index
    return None


def _begins(text: str, index: int, end: int, model: Model) -> bool:
    return joined_ids(model, model.encode(text[:index]), text[:end]) is not None


def _inside_character(text: str, index: int) -> bool:
    """Whether the characters on both sides of a place are one to a reader: marks, joined and
    coloured emoji, flags, a line end of two characters."""
    before, after = text[index - 1], text[index]
    marked = unicodedata.category(after).startswith("M") or ord(after) in SKIN_TONES
    joined = JOINER in (before, after) or (before, after) == ("\r", "\n")
    flag = ord(before) in REGIONAL and ord(after) in REGIONAL
    return marked or joined or flag
