"""Alignment by character spans and by position, against a naive loop and on real pairs of
tokenizers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvbridge.cache.align import align_positions, align_spans
from tests.models import TEXT, TOKENIZERS, UNICODE_TEXT, random_texts, tiny

MANY = settings(max_examples=150, deadline=None)


@st.composite
def segmented(draw, *, holes: bool = False) -> Tensor:
    """Spans `[tokens, 2]` of a text: ends never go back, some tokens spell nothing, gaps are
    dropped whitespace."""
    spans, at = [], 0
    for gap, width, kept in draw(
        st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5), st.booleans()), max_size=30)
    ):
        start, at = at + gap * (width > 0), at + gap * (width > 0) + width
        if kept or not holes:
            spans.append([start, at])
    return torch.tensor(spans, dtype=torch.int64).reshape(-1, 2)


def naive(sender: Tensor, receiver: Tensor) -> list[tuple[int, bool, bool]]:
    """For each receiver token, reading every sender token: row found, covered, ends meet."""
    rows = []
    for _, end in receiver.tolist():
        row, covered, exact = 0, False, False
        for i, (start, stop) in enumerate(sender.tolist()):
            if stop >= end:
                row, exact = i, stop == end
                covered = exact or start < end
                break
        rows.append((row, covered, exact))
    return rows


@given(segmented(), segmented())
@MANY
def test_equals_the_naive_loop(sender, receiver):
    kept = sender.clone(), receiver.clone()
    alignment, expected = align_spans(sender, receiver), naive(sender, receiver)
    assert alignment.covered.tolist() == [covered for _, covered, _ in expected]
    for index, (row, covered, _) in zip(alignment.index.tolist(), expected, strict=True):
        assert not covered or index == row
    hits = [exact for _, covered, exact in expected if covered]
    assert alignment.exact_share == pytest.approx(sum(hits) / len(hits) if hits else 0.0)
    assert torch.equal(sender, kept[0])
    assert torch.equal(receiver, kept[1])


@given(segmented(holes=True), segmented())
@MANY
def test_with_holes_equals_the_naive_loop(sender, receiver):
    alignment, expected = align_spans(sender, receiver), naive(sender, receiver)
    assert alignment.covered.tolist() == [covered for _, covered, _ in expected]


@given(segmented(), segmented())
@MANY
def test_the_end_found_is_the_smallest_not_before_its_own(sender, receiver):
    alignment = align_spans(sender, receiver)
    ends = sender[:, 1]
    for token in alignment.covered.nonzero()[:, 0].tolist():
        own, row = int(receiver[token, 1]), int(alignment.index[token])
        assert int(ends[row]) >= own
        assert row == 0 or int(ends[row - 1]) < own
        assert int(ends[row]) == int(ends[ends >= own].min())


@given(segmented(), segmented())
@MANY
def test_the_index_never_goes_back(sender, receiver):
    alignment = align_spans(sender, receiver)
    rows = alignment.index[alignment.covered]
    assert bool((rows[1:] >= rows[:-1]).all())
    assert len(alignment.index) == len(alignment.covered) == len(receiver)


@given(segmented())
@MANY
def test_equal_spans_are_the_identity(spans):
    alignment = align_spans(spans, spans)
    assert bool(alignment.covered.all())
    assert alignment.exact_share == (1.0 if len(spans) else 0.0)
    assert torch.equal(spans[alignment.index, 1], spans[:, 1])
    distinct = [i for i in range(len(spans)) if i == 0 or spans[i, 1] != spans[i - 1, 1]]
    assert [int(alignment.index[i]) for i in distinct] == distinct


@given(st.sets(st.integers(0, 30)), st.integers(0, 30))
@MANY
def test_positions(held, count):
    sender, receiver = torch.tensor(sorted(held), dtype=torch.int64), torch.arange(count)
    alignment = align_positions(sender, receiver)
    assert alignment.covered.tolist() == [p in held for p in range(count)]
    for position in alignment.covered.nonzero()[:, 0].tolist():
        assert int(sender[alignment.index[position]]) == position


def test_a_hole_is_not_covered_by_the_token_after_it():
    sender = torch.tensor([[0, 3], [7, 9], [9, 12]])
    receiver = torch.tensor([[0, 3], [3, 5], [5, 7], [7, 8], [8, 10], [10, 12], [12, 14]])
    alignment = align_spans(sender, receiver)
    assert alignment.covered.tolist() == [True, False, False, True, True, True, False]
    assert alignment.index[alignment.covered].tolist() == [0, 1, 2, 2]
    assert alignment.exact_share == 0.5


def test_nothing_to_align():
    nothing, some = torch.zeros(0, 2, dtype=torch.int64), torch.tensor([[0, 1]])
    assert align_spans(nothing, some).covered.tolist() == [False]
    assert len(align_spans(some, nothing).index) == 0
    assert align_spans(nothing, nothing).exact_share == 0.0
    assert align_positions(nothing[:, 0], torch.arange(3)).covered.tolist() == [False] * 3


PAIRS = [(a, b) for a in TOKENIZERS for b in TOKENIZERS if a != b]


@pytest.mark.parametrize(("sender_kind", "receiver_kind"), PAIRS)
@pytest.mark.parametrize("text", [UNICODE_TEXT, TEXT], ids=["unicode", "plain"])
def test_real_tokenizers(sender_kind, receiver_kind, text):
    sender, receiver = (
        tiny("llama", tokenizer=kind).encode(text) for kind in (sender_kind, receiver_kind)
    )
    alignment, expected = (
        align_spans(sender.spans, receiver.spans),
        naive(sender.spans, receiver.spans),
    )
    assert alignment.covered.tolist() == [covered for _, covered, _ in expected]
    assert float(alignment.covered.float().mean()) > 0.8
    for token in alignment.covered.nonzero()[:, 0].tolist():
        row = int(alignment.index[token])
        assert row == expected[token][0]
        read = text[: int(sender.spans[row, 1])]
        assert read.startswith(text[: int(receiver.spans[token, 1])]), (
            "the sender has read all of the receiver's token"
        )
    if text == TEXT:
        assert alignment.exact_share > 0.2


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_spans_spell_the_text(kind):
    encoding = tiny("llama", tokenizer=kind).encode(UNICODE_TEXT)
    if kind in ("bytes", "bytes_other", "bos"):
        assert int(encoding.spans[-1, 1]) == len(UNICODE_TEXT)
        assert set(range(len(UNICODE_TEXT))) == {
            i for a, b in encoding.spans.tolist() for i in range(a, b)
        }


def test_two_byte_level_tokenizers_meet_often():
    sender, receiver = tiny("llama", tokenizer="bytes"), tiny("llama", tokenizer="bytes_other")
    assert sender.geometry.tokenizer_digest != receiver.geometry.tokenizer_digest
    shares = [
        align_spans(sender.encode(t).spans, receiver.encode(t).spans).exact_share
        for t in random_texts(5)
    ]
    assert 0.4 < min(shares) < 1
