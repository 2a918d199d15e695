"""A token ends with the last character that is whole once it is read: over scripts whose characters
are many bytes, and over tokenizers that cut characters into bytes."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

import kvbridge
from kvbridge import Bridge, KVSnapshot, capture
from kvbridge.cache.align import align_spans
from kvbridge.model.text import encode, encode_ids
from tests.handoff.handoffs import assert_exact, continued
from tests.models import SENTENCES, tiny, tiny_tokenizer

MANY = settings(max_examples=60, deadline=None)
SCRIPTS = {
    "cjk": ["日本の首都は東京です。", "漢字", "北京是中國的首都", "𠮷野家"],
    "hangul": ["한국의 수도", "서울입니다", "값싼"],
    "jamo": ["\u1112\u1161\u11ab", "\u1100\u1173\u11af"],
    "devanagari": ["नमस्ते दुनिया", "क्षत्रिय", "हिन्दी"],
    "emoji": ["🍕", "👩‍👩‍👧", "👍🏽", "🇫🇷🇯🇵", "❤️", "🏳️‍🌈", "1️⃣"],
    "marks": ["e\u0301", "q\u0323\u0307", "café’s", "Z\u0351\u036b\u0343"],
    "plain": ["river", "rose", " ", "  ", "\n", "\t", "“ok”…", "123.5", "\u3000", "\u00a0"],
}
TEXTS = st.lists(
    st.one_of(
        *(st.sampled_from(pieces) for pieces in SCRIPTS.values()),
        st.text(st.characters(min_codepoint=0x3040, max_codepoint=0x30FF), max_size=3),
        st.text(st.characters(min_codepoint=0xAC00, max_codepoint=0xD7A3), max_size=3),
        st.text(st.characters(min_codepoint=0x1F300, max_codepoint=0x1F6FF), max_size=3),
        st.text(st.characters(min_codepoint=0x20, max_codepoint=0x24F), max_size=3),
    ),
    min_size=1,
    max_size=10,
).map("".join)
REPORTED = (
    "日本の首都は東京です。",
    "I love 🍕 and 😀 so much",
    "The café’s naïve résumé — “ok”…",
    "한국의 수도는 서울입니다",
    "नमस्ते दुनिया",
    "👩‍👩‍👧 family",
)


@cache
def tokenizer(kind: str) -> Any:
    """One of KINDS; those of tests.models, the demo's, and models' own ways of cutting text."""
    if kind == "demo":
        return kvbridge.load("demo:sender").tokenizer
    if kind in ("gemma", "gemma_learned"):
        # Spaces become ▁, whole pieces of any script, bytes for what the vocabulary lacks.
        made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        made.normalizer = normalizers.Replace(" ", "▁")
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        special = ["<pad>", "<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=special)
        learned = ["日本の 首都 한국의 नमस्ते 🍕 👩"] * 4 if kind == "gemma_learned" else []
        made.train_from_iterator([*SENTENCES, *learned], trainer)
        # As in Gemma's own file, bytes are pieces like others: decoding keeps them as text.
        body = json.loads(made.to_str())
        body["added_tokens"] = [t for t in body["added_tokens"] if "0x" not in t["content"]]
        made = Tokenizer.from_str(json.dumps(body))
    elif kind == "trimmed":
        # As Llama 3's: a space belongs to the token after it, and no span holds it.
        made = Tokenizer.from_str(tiny_tokenizer("bytes").backend_tokenizer.to_str())
        made.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=True),
                processors.TemplateProcessing(
                    single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
                ),
            ]
        )
    else:
        return tiny_tokenizer(kind)
    made.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>")


KINDS = ("bytes", "bytes_other", "bos", "demo", "gemma", "gemma_learned", "trimmed")


def spelled(made: Any, ids: list[int]) -> list[int]:
    """Oracle: the most characters that any beginning of the ids up to each token decodes to."""
    ends: list[int] = []
    for stop in range(1, len(ids) + 1):
        text = made.decode(
            ids[:stop], skip_special_tokens=True, clean_up_tokenization_spaces=False
        ).rstrip("�")
        ends.append(max([len(text), *ends[-1:]]))
    return ends


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@MANY
def test_no_token_ends_behind_what_it_has_seen(kind, text):
    made = tokenizer(kind)
    encoding = encode(made, text)
    starts, ends = encoding.spans[:, 0].tolist(), encoding.spans[:, 1].tolist()
    assert ends == sorted(ends)
    assert all(0 <= start <= end <= len(text) for start, end in zip(starts, ends, strict=True))
    seen = spelled(made, encoding.ids.tolist())
    if made.decode(encoding.ids, skip_special_tokens=True) == text:
        assert all(end <= most for end, most in zip(ends, seen, strict=True))
        if kind != "trimmed":
            assert ends == seen


@pytest.mark.parametrize("sender", KINDS)
@pytest.mark.parametrize("receiver", KINDS)
def test_covered_tokens_read_rows_that_have_seen_their_last_character(sender, receiver):
    for text in (*REPORTED, *("".join(pieces) for pieces in SCRIPTS.values())):
        assert_sighted(tokenizer(sender), tokenizer(receiver), text)


@given(text=TEXTS, kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)))
@MANY
def test_covered_tokens_are_sighted_on_any_text(text, kinds):
    assert_sighted(tokenizer(kinds[0]), tokenizer(kinds[1]), text)


def assert_sighted(sender: Any, receiver: Any, text: str) -> None:
    """Every covered token's sender row has decoded to its last character, and no row before it."""
    read, written = encode(sender, text), encode(receiver, text)
    alignment = align_spans(read.spans, written.spans)
    seen = spelled(sender, read.ids.tolist())
    ends = written.spans[:, 1].tolist()
    for token in alignment.covered.nonzero()[:, 0].tolist():
        row = int(alignment.index[token])
        assert seen[row] >= ends[token], (text, token)
        assert row == 0 or int(read.spans[row - 1, 1]) < ends[token]
    rows = alignment.index[alignment.covered].tolist()
    assert all(a <= b for a, b in pairwise(rows))
    # What has seen a character finds a row that has seen it, too; what has seen none needs none.
    assert bool(alignment.covered[written.spans[:, 1] > 0].all()), (text, alignment.covered)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@MANY
def test_equal_tokenizers_align_to_themselves(kind, text):
    spans = encode(tokenizer(kind), text).spans
    alignment = align_spans(spans, spans)
    assert bool(alignment.covered.all())
    assert alignment.exact_share == (1.0 if len(spans) else 0.0)
    assert torch.equal(spans[alignment.index, 1], spans[:, 1])
    first = [i for i in range(len(spans)) if i == 0 or spans[i, 1] != spans[i - 1, 1]]
    assert alignment.index[first].tolist() == first


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, cut=st.integers(0, 6))
@MANY
def test_ids_alone_say_the_same(kind, text, cut):
    """Ids without their text, cut short within a character or put together otherwise."""
    made = tokenizer(kind)
    pieces = [made(c, add_special_tokens=False)["input_ids"] for c in text]
    ids = torch.tensor([i for piece in pieces for i in piece], dtype=torch.int64)
    for some in (ids, ids[: len(ids) - cut]):
        spelling, encoding = encode_ids(made, some)
        ends = encoding.spans[:, 1].tolist()
        assert torch.equal(encoding.ids, some)
        assert ends == sorted(ends)
        assert all(end <= len(spelling) for end in ends)
        most = spelled(made, some.tolist())
        if kind != "trimmed":
            assert ends == most
        else:
            assert all(a <= b for a, b in zip(ends, most, strict=True))


@pytest.mark.parametrize("text", REPORTED)
def test_a_snapshot_cut_within_a_character_covers_what_it_has_seen(text):
    model = tiny("llama")
    ids = model.encode(text).ids
    whole = capture(model, text)
    for stop in range(1, len(ids) + 1):
        part = capture(model, input_ids=ids[:stop])
        seen = max(spelled(model.tokenizer, ids[:stop].tolist()))
        assert part.characters == seen
        given_text = KVSnapshot.from_cache(whole.to_cache(model), model, ids, text=text)
        assert torch.equal(given_text.spans, whole.spans)
        assert torch.equal(part.spans[:, 1], whole.spans[:stop, 1])
    handoff = Bridge(None, sender=model, receiver=model).handoff(
        capture(model, input_ids=ids[:-1]), text
    )
    assert_exact(handoff, continued(model, ids))
