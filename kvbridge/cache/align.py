"""Which sender token each receiver token reads.

Same tokenizer: itself. Different tokenizers: over the same text, the first sender token that ends
at or after the receiver token's own end: the first one whose cache has seen every character of the
receiver's token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MIN_EXACT_SHARE = 0.2
"""Share of covered tokens with an exact end below which two tokenizers are not worth pairing."""


@dataclass(frozen=True)
class Alignment:
    """`index` `[receiver tokens]`: row of the sender read by each receiver token (int64); `covered`
    `[receiver tokens]`: False where the sender's rows leave that part of the text out;
    `exact_share`: share of covered tokens whose end a sender token's end meets exactly.
    """

    index: Tensor
    covered: Tensor
    exact_share: float


def align_spans(sender: Tensor, receiver: Tensor) -> Alignment:
    """Aligns by character spans `[tokens, 2]` (int64, ends never going back) over the same text.

    A receiver token is covered when the sender token found starts before the receiver token's end,
    or ends with it. Neither argument is modified.
    """
    if len(sender) == 0 or len(receiver) == 0:
        return _uncovered(len(receiver))
    ends = receiver[:, 1].contiguous()
    # "left": of the sender tokens with one and the same end the first, the earliest that has seen
    # every character of the receiver's token.
    insertion = torch.searchsorted(sender[:, 1].contiguous(), ends, side="left")
    reaches = insertion < len(sender)
    index = insertion.clamp_max(len(sender) - 1)
    # Where the sender leaves text out, the token after the hole ends late enough, too, but starts
    # behind the receiver's token and has not seen it.
    starts_before = sender[index, 0] < ends
    exact = (sender[index, 1] == ends) & reaches
    covered = reaches & (starts_before | exact)
    share = float(exact[covered].double().mean()) if bool(covered.any()) else 0.0
    return Alignment(index, covered, share)


def align_positions(sender: Tensor, receiver: Tensor) -> Alignment:
    """Aligns equal tokenizations by position `[tokens]` (int64, ascending); holes in the sender are
    not covered."""
    if len(sender) == 0 or len(receiver) == 0:
        return _uncovered(len(receiver))
    index = torch.searchsorted(sender.contiguous(), receiver.contiguous()).clamp_max(
        len(sender) - 1
    )
    covered = sender[index] == receiver
    return Alignment(index, covered, 1.0 if bool(covered.any()) else 0.0)


def _uncovered(tokens: int) -> Alignment:
    return Alignment(
        torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, dtype=torch.bool), 0.0
    )
