"""The first tokens of a long text, without tokenising all of it."""

from __future__ import annotations

import torch

from kvbridge.model.model import Model
from kvbridge.model.text import Encoding

CHARACTERS_PER_TOKEN = 8
"""Characters that are tokenised at first for each token asked for: texts have three to five."""
UNSETTLED = 1024
"""Characters before a cut whose tokens are not used: they may be others where the text goes on."""


def encode_beginning(model: Model, text: str, tokens: int) -> Encoding:
    """What the first `tokens` tokens of `model.encode(text)` are, special tokens included.

    Only as much of the text is tokenised as they need: a tokenizer holds some two hundred bytes for
    every character. What a tokenizer makes of a place depends on the characters around it, never on
    those a thousand characters on; only tokens that far from the cut are taken.
    """
    settled_characters = max(1, tokens) * CHARACTERS_PER_TOKEN
    while settled_characters + UNSETTLED < len(text):
        part = model.encode(text[: settled_characters + UNSETTLED])
        ends = part.spans[:, 1].contiguous()
        settled = int(torch.searchsorted(ends, settled_characters, side="right"))
        if settled >= tokens:
            return cut(part, tokens)
        settled_characters *= 2
    return cut(model.encode(text), tokens)


def cut(encoding: Encoding, tokens: int) -> Encoding:
    """The first `tokens` tokens."""
    return Encoding(encoding.ids[:tokens], encoding.spans[:tokens])
