"""Characters that the sender splits into bytes: a receiver token reads a sender row that has seen
its last character whole, not the row of that character's first byte."""

from __future__ import annotations

import pytest

from kvbridge.cache.align import align_spans
from kvbridge.model.text import encode
from tests.cache.test_seen_characters import REPORTED, tokenizer


@pytest.mark.parametrize("text", REPORTED)
@pytest.mark.parametrize("kinds", [("demo", "gemma_learned"), ("bytes", "gemma_learned")])
def test_no_token_reads_a_row_that_has_not_seen_its_last_character(kinds, text):
    sender, receiver = (tokenizer(kind) for kind in kinds)
    read, written = encode(sender, text), encode(receiver, text)
    alignment = align_spans(read.spans, written.spans)
    covered = alignment.covered.nonzero()[:, 0].tolist()
    early = 0
    for token in covered:
        row = int(alignment.index[token])
        seen = sender.decode(read.ids[: row + 1], skip_special_tokens=True).rstrip("�")
        early += len(seen) < int(written.spans[token, 1])
    assert early == 0, f"{early} of {len(covered)} tokens read a row too early"
    assert covered
