"""Text as one tokenizer's tokens, and ids as text: where each token ends, in characters."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbridge.errors import UsageError

DECODE_CONTEXT, DECODE_PENDING = 4, 32
"""Settled stretches of tokens before the first unsettled token that a window decodes again, and
most unsettled tokens."""
REPLACEMENT = "�"
"""What decoders write for bytes that are no whole character yet."""


@dataclass(frozen=True)
class Encoding:
    """A text as one model's tokens: ids `[tokens]` and character spans `[tokens, 2]`.

    Both int64 on the CPU. A span ends with the last character that is whole once its token is read;
    the ends never go back. A token that holds only the first bytes of a character has an empty span
    where that character begins.
    """

    ids: Tensor
    spans: Tensor

    def __len__(self) -> int:
        return len(self.ids)


def encode(tokenizer: Any, text: str, *, special: bool = True) -> Encoding:
    """Ids and spans as the tokenizer itself would make them, the special tokens that it adds by
    itself included unless `special` says no.

    Raises UsageError for a lone surrogate, which no tokenizer and no file can hold.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"expected text, found a lone surrogate at character {error.start}"
        ) from None
    encoded = tokenizer(
        text, add_special_tokens=special, return_offsets_mapping=True, verbose=False
    )
    spans = torch.tensor(encoded["offset_mapping"], dtype=torch.int64).reshape(-1, 2)
    return Encoding(torch.tensor(encoded["input_ids"], dtype=torch.int64), _seen(spans, text))


def encode_ids(tokenizer: Any, token_ids: Tensor) -> tuple[str, Encoding]:
    """The text that `token_ids` `[tokens]` spell, and where each of them ends in it.

    Generated ids need not be what the tokenizer makes of their text. Special tokens that it adds by
    itself spell nothing.
    """
    ids = token_ids.to("cpu", torch.int64).flatten()
    prefix = special_prefix(tokenizer)
    start = len(prefix) if ids[: len(prefix)].tolist() == prefix else 0
    text = decode(tokenizer, ids[start:])
    canonical = encode(tokenizer, text)
    if torch.equal(canonical.ids, ids):
        return text, canonical
    ends = [0] * start + _ends(tokenizer, ids[start:])
    starts = [0, *ends][: len(ends)]
    pairs = list(zip(starts, ends, strict=True))
    spans = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    return text, Encoding(ids, spans.clamp_max(len(text)))


def decode(tokenizer: Any, ids: Tensor) -> str:
    """The text of ids `[tokens]`, special tokens and spaces as they are."""
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def special_prefix(tokenizer: Any) -> list[int]:
    """Special tokens that the tokenizer puts before every text by itself."""
    ids = tokenizer("", verbose=False)["input_ids"]
    return ids if set(ids) <= set(tokenizer.all_special_ids) else []


def _ends(tokenizer: Any, ids: Tensor) -> list[int]:
    """Characters that are settled once each of `ids` `[tokens]` is read.

    A character cut short is not yet one. Each step decodes a short window twice and counts what it
    adds, so that what decoders do between tokens (spaces, joined bytes) is done alike in both;
    decoding every prefix whole would take time quadratic in the tokens.
    """
    ends: list[int] = []
    settled_characters = settled_tokens = 0
    boundaries = deque([0], maxlen=DECODE_CONTEXT + 1)
    for index in range(len(ids)):
        # From where text was settled: from amid a character's bytes, some decoders read none of
        # the bytes that follow.
        window = boundaries[0]
        before = decode(tokenizer, ids[window:settled_tokens])
        now = decode(tokenizer, ids[window : index + 1])
        whole = now.rstrip(REPLACEMENT)
        seen = settled_characters + max(0, len(whole) - len(before))
        # Some decoders take a whole character back while the bytes after it are cut short.
        ends.append(max([seen, *ends[-1:]]))
        # Bytes that never become a character must not make the window grow without end.
        if whole == now or index - settled_tokens >= DECODE_PENDING:
            settled_characters += len(now) - len(before)
            settled_tokens = index + 1
            boundaries.append(settled_tokens)
    return ends


def _seen(spans: Tensor, text: str) -> Tensor:
    """A tokenizer's own spans `[tokens, 2]` of `text` as what each token has seen.

    A tokenizer gives every piece of a character that whole character's span, but only the last of
    them has seen it: where the next span begins before a token's end, the token ends there. Spans
    of nothing (special tokens) repeat the end before them. Whitespace that stands in no span,
    because the tokenizer trims or drops it, is the first that the token after it has seen.
    """
    tokens = len(spans)
    if tokens == 0:
        return spans
    holds_text = spans[:, 1] > spans[:, 0]
    own = torch.where(holds_text, torch.arange(tokens), tokens)
    at_or_after = torch.cummin(own.flip(0), dim=0).values.flip(0)
    following = torch.cat((at_or_after[1:], torch.tensor([tokens])))
    starts = torch.cat((spans[:, 0], torch.tensor([len(text)])))
    ends = torch.where(holds_text, torch.minimum(spans[:, 1], starts[following]), spans[:, 1])
    ends = torch.cummax(ends, dim=0).values
    starts = torch.where(holds_text, torch.minimum(spans[:, 0], ends), ends)
    before = torch.cat((torch.tensor([0]), ends[:-1]))
    for token in (starts > before).nonzero()[:, 0].tolist():
        if text[int(before[token]) : int(starts[token])].isspace():
            starts[token] = before[token]
    return torch.stack((starts, ends), dim=1)
