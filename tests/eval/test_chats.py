"""The chat benchmark: its items, what it scores, and that a chat runs through every condition."""

from __future__ import annotations

import pytest
import torch

from benchmarks.chats import CONDITIONS, TEMPLATES, answer_ids, chats, measure_rows, summary
from kvbridge import Bridge, demo
from kvbridge.errors import EvalError
from kvbridge.eval.conditions.setup import Setup
from tests.handoff.handoffs import identity, renamed
from tests.models import tiny_causal, wrapped

TEST = str(demo.texts("test"))


@pytest.fixture(scope="module")
def setup() -> Setup:
    receiver = wrapped(tiny_causal("llama", 0), "bytes", name="receiver")
    sender = renamed(wrapped(tiny_causal("llama", 0), "bytes_other", name="sender"))
    receiver.tokenizer.chat_template = TEMPLATES["notes"]
    bridge = Bridge(identity(sender, receiver), sender=sender, receiver=receiver)
    return Setup(sender, receiver, bridge, bridge)


def test_chats_are_held_out_documents_one_each():
    items = list(chats(TEST, 5))
    assert len({document for document, _, _ in items}) == len(items) == 5
    for _, messages, answer in items:
        assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant", "user"]
        assert answer.strip() == answer


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_answer_is_what_the_template_would_write(setup, template):
    model = setup.receiver
    before = model.tokenizer.chat_template
    model.tokenizer.chat_template = TEMPLATES[template]
    try:
        _, messages, answer = next(chats(TEST, 1))
        ids = answer_ids(model, messages, answer)
        assert model.tokenizer.decode(ids).strip() == answer
        whole = model.chat((*messages, {"role": "assistant", "content": answer})).encoding.ids
        prompt = model.chat(messages).encoding.ids
        assert torch.equal(whole[: len(prompt) + len(ids)], torch.cat((prompt, ids)))
        model.tokenizer.chat_template = "{{ messages | length }}"
        with pytest.raises(EvalError):
            answer_ids(model, messages, answer)
    finally:
        model.tokenizer.chat_template = before


def test_every_condition_runs_over_chats_and_their_plain_text(setup):
    rows = measure_rows({"chat": setup}, TEST, 2)
    assert {(row.form, row.condition) for row in rows} == {
        (form, name) for form in ("plain", "chat") for name in CONDITIONS
    }
    entries = {(e["form"], e["condition"]): e for e in summary(rows)}
    for form in ("plain", "chat"):
        native, floor = entries[form, "native"], entries[form, "no_context"]
        if native["loss"] < floor["loss"]:
            assert native["recovery"] == pytest.approx(1)
            assert floor["recovery"] == pytest.approx(0)
        assert native["prefill_share"] == 1
