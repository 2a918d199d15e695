"""Which split owns the beginning of a text: against sets of plain prefixes, and with few kept."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.fitting.beginnings import Beginnings
from kvbridge.fitting.data import SPLITS

TEXTS = st.lists(
    st.tuples(
        st.sampled_from(SPLITS),
        st.lists(st.sampled_from(["ab", "b", "漢", "👩‍👩‍👧", " "]), min_size=1, max_size=8),
    ),
    max_size=12,
)


def ends_of(pieces: list[str]) -> list[int]:
    ends, at = [0], 0
    for piece in pieces:
        at += len(piece)
        ends += [at] * len(piece)
    return ends


@given(TEXTS)
@settings(max_examples=200, deadline=None)
def test_equals_sets_of_prefixes(texts):
    beginnings, seen = Beginnings(), {split: set() for split in SPLITS}
    for split, pieces in texts:
        text, ends = "".join(pieces), ends_of(pieces)
        own = beginnings.own(split, text, torch.tensor(ends))
        others = set().union(*(seen[other] for other in SPLITS if other != split))
        expected = [text[:end] not in others for end in ends]
        assert own.tolist() == expected
        seen[split] |= {text[:end] for end, mine in zip(ends, expected, strict=True) if mine}


@given(TEXTS, st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_with_few_kept_nothing_is_held_that_should_not_be(texts, most):
    """Fewer digests than prefixes: what is kept stays below the limit, and a row that is known to
    be another split's stays so."""
    few = Beginnings(most)
    for split, pieces in texts:
        text, ends = "".join(pieces), ends_of(pieces)
        few.own(split, text, torch.tensor(ends))
        held = [digest for levels in few._seen.values() for level in levels for digest in level]
        assert len(held) <= most
        assert len(set(held)) == len(held)
        assert all(int(digest) & int(few._mask) == 0 for digest in held)


def test_a_long_shared_beginning_is_told_to_within_what_is_kept():
    few = Beginnings(256)
    letters = torch.randint(97, 122, (6000,), generator=torch.Generator().manual_seed(0))
    text = "".join(map(chr, letters.tolist()))
    ends = torch.arange(2001)
    assert bool(few.own("train", text[:2000], ends).all())
    again = few.own("test", text[:1000] + text[3000:4000], ends)
    wrong = int(again[:1001].sum()) + int((~again[1001:]).sum())
    assert wrong < 100, wrong
    assert bool(few.own("train", text[:2000], ends).float().mean() > 0.95)


def test_a_text_begins_where_it_begins():
    """The same words elsewhere in a text are no shared beginning."""
    beginnings, ends = Beginnings(), torch.arange(1, 9)
    assert bool(beginnings.own("train", "one two.", ends).all())
    assert bool(beginnings.own("test", "two one.", ends).all())
    assert beginnings.own("test", "one six.", ends).tolist() == [False] * 4 + [True] * 4
