"""Message by message: a covered token reads the first row that has seen its last character of the
same message, and nothing that the receiver's text does not have."""

from __future__ import annotations

import pytest
import torch

from kvbridge.cache.align import MOST_BETWEEN, Stretch, align_between, align_stretches


def spans(text: str, sizes: list[int]) -> torch.Tensor:
    """`[tokens, 2]` of a text cut into pieces of these sizes, over and over."""
    rows, at, turn = [], 0, 0
    while at < len(text):
        end = min(len(text), at + sizes[turn % len(sizes)])
        rows.append((at, end))
        at, turn = end, turn + 1
    return torch.tensor(rows)


CONTENTS = ["The bell rang twice", "Yes", "And the snow, when did it go?"]
SENDER = "".join(f"<|{c}|>\n" for c in CONTENTS) + "<|"
RECEIVER = "[s] " + "".join(f"[turn]{c}[/turn]" for c in CONTENTS) + "[turn]"
WHOLE = [Stretch(SENDER.find(c), RECEIVER.find(c), len(c), cut=False) for c in CONTENTS]


@pytest.mark.parametrize("read", [[1], [3], [4, 1, 6], [9]])
@pytest.mark.parametrize("written", [[1], [2, 5], [3], [7]])
def test_a_covered_token_reads_the_first_row_that_has_seen_its_character(read, written):
    sender, receiver = spans(SENDER, read), spans(RECEIVER, written)
    alignment = align_stretches(sender, receiver, WHOLE)
    for token, (_, end) in enumerate(receiver.tolist()):
        inside = [s for s in WHOLE if s.receiver < end <= s.receiver + s.length]
        assert bool(alignment.covered[token]) == bool(inside)
        if inside:
            seen = end - inside[0].receiver + inside[0].sender
            row = int(alignment.index[token])
            assert SENDER[seen - 1] == RECEIVER[end - 1]
            assert sender[row, 1] >= seen
            assert row == 0 or sender[row - 1, 1] < seen


@pytest.mark.parametrize("read", [[1], [3], [4, 1, 6], [9]])
def test_no_row_over_a_cut_is_read(read):
    edited = SENDER.replace("when did it go", "where does it lie")
    place, length = edited.find("And the"), len("And the snow, whe")
    cut = [*WHOLE[:2], Stretch(place, RECEIVER.find("And the"), length, cut=True)]
    sender, receiver = spans(edited, read), spans(RECEIVER, [2])
    alignment = align_stretches(sender, receiver, cut)
    rows = alignment.index[alignment.covered]
    assert int(sender[rows, 1].max()) <= place + length


def outside(receiver: torch.Tensor) -> torch.Tensor:
    marks = torch.ones(len(receiver), dtype=torch.bool)
    for s in WHOLE:
        marks &= (receiver[:, 1] <= s.receiver) | (receiver[:, 0] >= s.receiver + s.length)
    return marks


def test_template_tokens_read_the_rows_beside_the_messages():
    sender, receiver = spans(SENDER, [1]), spans(RECEIVER, [1])
    alignment, free = align_stretches(sender, receiver, WHOLE), outside(receiver)
    filled = align_between(alignment, free, len(sender), complete=True)
    assert bool(filled.covered.all())
    assert torch.equal(filled.index[alignment.covered], alignment.index[alignment.covered])
    assert bool((filled.index.diff() >= 0).all())
    assert int(filled.index.max()) < len(sender)
    ending = align_between(alignment, free, len(sender), complete=False)
    last = int(alignment.covered.nonzero()[-1])
    assert bool(ending.covered[:last].all())
    assert not bool(ending.covered[last + 1 :].any())


def test_long_runs_and_tokens_of_messages_are_left():
    sender, receiver = spans(SENDER, [1]), spans(RECEIVER, [1])
    free = outside(receiver)
    alignment = align_stretches(sender, receiver, [WHOLE[0], WHOLE[2]])
    filled = align_between(alignment, free, len(sender), complete=True)
    middle = WHOLE[1].receiver
    assert not bool(filled.covered[middle : middle + WHOLE[1].length].any())
    free[:] = True
    assert WHOLE[2].receiver - WHOLE[0].receiver - WHOLE[0].length > MOST_BETWEEN
    filled = align_between(alignment, free, len(sender), complete=True)
    assert not bool(filled.covered[middle : middle + WHOLE[1].length].any())


def test_no_tokens_at_all():
    empty = torch.zeros((0, 2), dtype=torch.int64)
    for sender, receiver in ((empty, spans(RECEIVER, [2])), (spans(SENDER, [2]), empty)):
        alignment = align_stretches(sender, receiver, WHOLE)
        free = torch.ones(len(receiver), dtype=torch.bool)
        assert not bool(align_between(alignment, free, len(sender), complete=True).covered.any())
