"""What a setting of `generate` may hold: a test and the words of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from torch import Tensor
from transformers.generation.configuration_utils import BaseWatermarkingConfig

_BOUND = 2**31
"""No count or token id is as large: what is would run for years, or not fit a tensor."""


@dataclass(frozen=True)
class Kind:
    """`holds` of a value that is not None, and what was expected in words."""

    words: str
    holds: Callable[[Any], bool]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _BOUND


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _tokens(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim <= 1 and not value.is_floating_point() and value.numel() > 0
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(map(_whole, value))
    return _whole(value)


def _words(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(word, (list, tuple)) and word and _tokens(word) for word in value)


def _biases(value: Any) -> bool:
    """A dict from words to biases, or a list of pairs of both."""
    if not isinstance(value, (dict, list, tuple)) or not value:
        return False
    pairs = list(value.items()) if isinstance(value, dict) else list(value)
    shaped = all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs)
    return (
        shaped and _words([word for word, _ in pairs]) and all(_number(bias) for _, bias in pairs)
    )


def _decay(value: Any) -> bool:
    pair = isinstance(value, (list, tuple)) and len(value) == 2
    return pair and _whole(value[0]) and _number(value[1])


def _strings(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    listed = isinstance(texts, (list, tuple)) and len(texts) > 0
    return listed and all(isinstance(text, str) and text for text in texts)


def _callables(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(callable, value))


def _streamer(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("put", "end"))


COUNT = Kind("a whole number of at least 1", lambda x: _whole(x) and x >= 1)
AMOUNT = Kind("a whole number of at least 0", lambda x: _whole(x) and x >= 0)
NUMBER = Kind("a finite number", _number)
POSITIVE = Kind("a number above 0", lambda x: _number(x) and x > 0)
SHARE = Kind("a number from 0 to 1", lambda x: _number(x) and 0 <= x <= 1)
FRACTION = Kind("a number above 0 and at most 1", lambda x: _number(x) and 0 < x <= 1)
FLAG = Kind("True or False", lambda x: isinstance(x, bool))
TOKEN = Kind("a token id", _whole)
LISTED = Kind("a list of token ids", lambda x: isinstance(x, (list, tuple)) and all(map(_whole, x)))
TOKENS = Kind("a token id or a list of them", _tokens)
WORDS = Kind("a list of words, each a list of token ids", _words)
BIASES = Kind("words of token ids, each with its bias", _biases)
DECAY = Kind("a whole number and a factor", _decay)
STRINGS = Kind("a text or a list of texts, none empty", _strings)
CALLABLE = Kind("a function", callable)
CALLABLES = Kind("a list of functions", _callables)
STREAMER = Kind("a streamer with put and end", _streamer)
TOKENIZER = Kind("a tokenizer", lambda x: callable(getattr(x, "get_vocab", None)))
WATERMARK = Kind(
    "a WatermarkingConfig or a dict of its fields",
    lambda x: isinstance(x, (dict, BaseWatermarkingConfig)),
)
WHATEVER = Kind("anything", lambda _: True)
