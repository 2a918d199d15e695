"""Which sender token each receiver token reads.

Same tokenizer: itself. Different tokenizers: over the same text, the first sender token that ends
at or after the receiver token's own end: the first one whose cache has seen every character of the
receiver's token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_EXACT_SHARE = 0.2
"""Share of covered tokens with an exact end below which two tokenizers are not worth pairing."""

MOST_BETWEEN = 16
"""Most template tokens in a row that are given rows beside them."""


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


@dataclass(frozen=True)
class Stretch:
    """Text that two sides have alike: `length` characters from `sender` on in the one and from
    `receiver` on in the other. `cut`: it ends where they begin to differ; otherwise with a message,
    around which each template may write what it likes."""

    sender: int
    receiver: int
    length: int
    cut: bool


def align_stretches(sender: Tensor, receiver: Tensor, stretches: Sequence[Stretch]) -> Alignment:
    """`align_spans` within each of `stretches` (ascending on both sides): a covered receiver token
    ends in one, and reads the first sender row that has seen that character of it. Tokens that end
    elsewhere are not covered. Neither argument is modified."""
    index = torch.zeros(len(receiver), dtype=torch.int64)
    covered = torch.zeros(len(receiver), dtype=torch.bool)
    exact = 0
    for stretch in stretches:
        begin, end = stretch.receiver, stretch.receiver + stretch.length
        inside = (receiver[:, 1] > begin) & (receiver[:, 1] <= end)
        tokens = inside.nonzero()[:, 0]
        moved = receiver[tokens] + (stretch.sender - stretch.receiver)
        part = align_spans(sender, moved)
        reads = part.covered
        if stretch.cut and len(sender):
            # A sender token over the end has read what the receiver's text does not have.
            reads = reads & (sender[part.index, 1] <= stretch.sender + stretch.length)
        index[tokens] = part.index
        covered[tokens] = reads
        exact += int((sender[part.index[reads], 1] == moved[reads, 1]).sum())
    share = exact / int(covered.sum()) if bool(covered.any()) else 0.0
    return Alignment(index, covered, share)


def align_between(
    alignment: Alignment, outside: Tensor, sender_tokens: int, *, complete: bool
) -> Alignment:
    """`alignment` with the short runs of tokens `outside` `[tokens]` all messages covered, too.

    Before a covered token each reads the sender row as far before that token's row as it stands
    before the token, but none before what the last covered token reads. `complete`: so do those
    behind the last covered token, counted from it on. A run of more than MOST_BETWEEN is left out:
    a template that writes so much says something of its own.
    """
    index, covered = alignment.index.clone(), alignment.covered.clone()
    places = covered.nonzero()[:, 0].tolist()

    def template(first: int, last: int) -> bool:
        return 0 < last - first <= MOST_BETWEEN and bool(outside[first:last].all())

    for previous, following in zip([-1, *places], places, strict=False):
        if not template(previous + 1, following):
            continue
        lowest = 0 if previous < 0 else int(index[previous])
        for place in range(previous + 1, following):
            index[place] = max(lowest, int(index[following]) - (following - place))
            covered[place] = True
    if complete and places and template(places[-1] + 1, len(index)):
        for place in range(places[-1] + 1, len(index)):
            index[place] = min(sender_tokens - 1, int(index[places[-1]]) + place - places[-1])
            covered[place] = True
    return Alignment(index, covered, alignment.exact_share)


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
