"""Token ids as text: where each token ends, for canonical ids and for ids that a model
generated."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge import Bridge, capture
from tests.handoff.handoffs import assert_exact, continued
from tests.models import TEXT, TOKENIZERS, UNICODE_TEXT, tiny

PROMPT = TEXT[:180]


def spelled(tokenizer, ids: list[int]) -> list[int]:
    """Oracle: characters settled once each token is read, by decoding every prefix from the
    start."""
    ends: list[int] = []
    for stop in range(1, len(ids) + 1):
        settled = tokenizer.decode(ids[:stop], clean_up_tokenization_spaces=False).rstrip("�")
        ends.append(max([len(settled), *ends[-1:]]))
    return ends


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("seed", range(6))
def test_generated_ids_have_the_spans_they_spell(kind, seed):
    model = tiny("llama", tokenizer=kind)
    draw = torch.Generator().manual_seed(seed)
    if seed < 3:
        ids = torch.randint(4, len(model.tokenizer), (60,), generator=draw)
    else:
        pieces = [
            model.tokenizer(c, add_special_tokens=False)["input_ids"] for c in UNICODE_TEXT + PROMPT
        ]
        ids = torch.tensor([i for piece in pieces for i in piece][seed * 7 :])
    text, encoding = model.encode_ids(ids)
    assert text == model.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert torch.equal(encoding.ids, ids)
    assert encoding.spans[:, 1].tolist() == spelled(model.tokenizer, ids.tolist())
    assert bool((encoding.spans[1:, 1] >= encoding.spans[:-1, 1]).all())
    assert bool((encoding.spans[:, 0] <= encoding.spans[:, 1]).all())
    assert int(encoding.spans[-1, 1]) <= len(text)
    assert seed < 3 or int(encoding.spans[-1, 1]) == len(text)


def test_a_text_that_stops_within_a_character_is_a_prefix_of_the_whole():
    model = tiny("llama")
    text = PROMPT + " 漢"
    ids = model.encode(text).ids
    snapshot = capture(model, input_ids=ids[:-1])
    assert snapshot.characters == len(text) - 1
    handoff = Bridge(None, sender=model, receiver=model).handoff(snapshot, text)
    assert handoff.decision.reason == "exact", str(handoff.decision)
    assert_exact(handoff, continued(model, ids))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_canonical_ids_have_the_tokenizers_own_spans(kind):
    model = tiny("llama", tokenizer=kind)
    encoding = model.encode(PROMPT)
    text, decoded = model.encode_ids(encoding.ids)
    if kind != "wordpiece":
        assert text == PROMPT
        assert torch.equal(decoded.spans, encoding.spans)


@given(st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_spans_never_go_back_and_end_with_the_text(text):
    for kind in ("bytes", "bos"):
        encoding = tiny("llama", tokenizer=kind).encode(text)
        ends = encoding.spans[:, 1].tolist()
        assert ends == sorted(ends)
        if text:
            assert ends[-1] == len(text)


def test_a_bos_that_the_tokenizer_does_not_add_is_text():
    """The same tokens come back from the text, whoever wrote the first one."""
    for kind, text in (("bytes", "<s>river rose"), ("bos", "river rose")):
        model = tiny("llama", tokenizer=kind)
        ids = model.encode(text).ids
        assert int(ids[0]) == 1
        spelled_text, encoding = model.encode_ids(ids)
        assert spelled_text == text
        assert torch.equal(encoding.ids, ids)
        assert torch.equal(encoding.spans, model.encode(text).spans)


def test_special_tokens_amid_generated_ids():
    model = tiny("llama", tokenizer="bos")
    words = model.tokenizer("river rose", add_special_tokens=False)["input_ids"]
    ids = torch.tensor([1, *words, 2, 1, *words])
    text, encoding = model.encode_ids(ids)
    assert text == "river rose</s><s>river rose"
    assert encoding.spans[0].tolist() == [0, 0]
    assert encoding.spans[:, 1].tolist()[1:] == spelled(model.tokenizer, ids[1:].tolist())
