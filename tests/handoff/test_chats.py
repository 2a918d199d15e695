"""A chat crosses from one template to another, and a prompt that was edited goes on from what it
has in common with the snapshot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvbridge import Bridge, KVSnapshot, RepairPlan, capture
from kvbridge.errors import UsageError
from kvbridge.handoff import stages
from kvbridge.handoff.common import WORTH
from kvbridge.handoff.cost import prefill_flops
from tests.handoff.handoffs import assert_exact, continued, identity, renamed
from tests.models import SENTENCES, tiny_causal, wrapped

TURN = "{{ m.role }}|>{{ m.content | trim }}<|end|>\n"
SENDERS = "{% for m in messages %}<|" + TURN + "{% endfor %}<|assistant|>"
RECEIVERS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role | upper }}] {{ m.content | trim }} "
    "{% endfor %}{% if add_generation_prompt %}[ASSISTANT] {% endif %}"
)
ANSWER_ONLY = RECEIVERS.replace("m.content | trim", "m.content.split('</think>')[-1] | trim")
CHAT = [
    {"role": "system", "content": SENTENCES[0]},
    {"role": "user", "content": SENTENCES[1] + " " + SENTENCES[2]},
    {"role": "assistant", "content": SENTENCES[3]},
    {"role": "user", "content": SENTENCES[4]},
]


def edited(number: int, content: str) -> list[dict]:
    """The chat with another text in one message."""
    changed = [dict(message) for message in CHAT]
    changed[number]["content"] = content
    return changed


@pytest.fixture(scope="module", params=["bytes", "metaspace", "bytes_other"])
def bridge(request) -> Bridge:
    """Same weights under two contracts, two tokenizers and two templates."""
    receiver = wrapped(tiny_causal("llama", 0), "bytes", name="receiver")
    sender = renamed(wrapped(tiny_causal("llama", 0), request.param, name="sender"))
    sender.tokenizer.chat_template = SENDERS
    receiver.tokenizer.chat_template = RECEIVERS
    return Bridge(identity(sender, receiver), sender=sender, receiver=receiver)


@pytest.fixture(scope="module")
def own() -> Bridge:
    """One model that hands over to itself."""
    model = wrapped(tiny_causal("llama", 0), "bytes", name="own")
    model.tokenizer.chat_template = RECEIVERS
    return Bridge(None, sender=model, receiver=model)


def given(bridge: Bridge, template_tokens: Any) -> Bridge:
    """The same bridge with another way to treat template tokens."""
    return Bridge(
        bridge.translator,
        sender=bridge.sender,
        receiver=bridge.receiver,
        template_tokens=template_tokens,
    )


def aligned(bridge: Bridge, snapshot: KVSnapshot, messages: list[dict], **options):
    request = bridge.request(snapshot, messages=messages, **options)
    return stages.align(bridge.pair, stages.check(bridge.pair, [request]))[0]


def test_a_chat_crosses_templates(bridge):
    snapshot = capture(bridge.sender, messages=CHAT)
    handoff = bridge.handoff(snapshot, messages=CHAT)
    assert handoff.decision.reason == "ungated", str(handoff.decision)
    assert handoff.provenance.fidelity == "approximate"
    assert torch.equal(handoff.ids, bridge.receiver.chat(CHAT).encoding.ids)
    assert handoff.cached == len(handoff.ids) - 1
    handoff.generate(2)


@pytest.mark.parametrize("template_tokens", ["recompute", "translate"])
def test_every_token_of_a_message_reads_it(bridge, template_tokens):
    snapshot = capture(bridge.sender, messages=CHAT)
    request = aligned(given(bridge, template_tokens), snapshot, CHAT)
    assert request.refusal is None
    alignment = request.aligned.alignment
    held, ends = bridge.sender.chat(CHAT), request.encoding.spans[:, 1]
    inside = torch.zeros(request.cached, dtype=torch.bool)
    for mine, other in zip(request.passages, held.passages, strict=True):
        for token in range(request.cached):
            end = int(ends[token])
            if not mine.start < end <= mine.end:
                continue
            inside[token] = True
            seen = end - mine.start + other.start
            row = int(alignment.index[token])
            assert held.text[seen - 1] == request.text[end - 1]
            assert int(snapshot.spans[row, 1]) >= seen
            assert row == 0 or int(snapshot.spans[row - 1, 1]) < seen
    assert bool(alignment.covered[inside].all())
    # The receiver's own template tokens are recomputed, or read rows beside the messages.
    if template_tokens == "recompute":
        assert torch.equal(alignment.covered, inside)
        recomputed = set(request.aligned.chosen.tolist())
        assert set((~inside).nonzero()[:, 0].tolist()) <= recomputed
    else:
        read = alignment.index[alignment.covered]
        assert bool((read.diff() >= 0).all())


def test_template_tokens_are_translated_where_they_are_few(bridge):
    snapshot = capture(bridge.sender, messages=CHAT)
    request = aligned(bridge, snapshot, CHAT)
    assert bool(request.aligned.alignment.covered.all())
    more = given(bridge, "recompute").handoff(snapshot, messages=CHAT).decision
    less = bridge.handoff(snapshot, messages=CHAT).decision
    assert less.predicted_flops < more.predicted_flops
    with pytest.raises(UsageError, match="template_tokens"):
        given(bridge, "drop")


def test_what_a_template_says_at_length_is_recomputed(bridge):
    """Tools that stand in one template alone have no row to be read from."""
    snapshot = capture(bridge.sender, messages=CHAT)
    said = RECEIVERS.replace("[{{", "{% if loop.last %}" + SENTENCES[7] * 2 + "{% endif %}[{{")
    request = aligned(bridge, snapshot, CHAT, template={"chat_template": said})
    start = request.text.find(SENTENCES[7])
    starts, ends = request.encoding.spans[: request.cached].unbind(1)
    inside = (starts > start) & (ends <= start + 2 * len(SENTENCES[7]))
    assert int(inside.sum()) > 20
    assert not bool(request.aligned.alignment.covered[inside].any())


def test_a_message_that_is_altered_is_recomputed(bridge):
    """It cannot be told from what the template writes itself, so nothing beside it is guessed."""
    upper = "{% for m in messages %}[{{ m.content | upper if loop.index == 3 else m.content }}]"
    both = {"chat_template": upper + "{% endfor %}"}
    snapshot = capture(bridge.sender, messages=CHAT, template=both)
    assert [p.located for p in snapshot.passages] == [True, True, False, True]
    other = {"chat_template": "> " + both["chat_template"].replace("[", "(").replace("]", ")")}
    request = aligned(bridge, snapshot, CHAT, template=other)
    ends = request.encoding.spans[: request.cached, 1]
    held = torch.zeros(request.cached, dtype=torch.bool)
    for passage in request.passages:
        if passage.located:
            held |= (ends > passage.start) & (ends <= passage.end)
    assert torch.equal(request.aligned.alignment.covered, held)


def test_rows_left_out_within_a_message_are_recomputed(bridge):
    whole = capture(bridge.sender, messages=CHAT)
    snapshot = whole.select(torch.cat((torch.arange(30), torch.arange(60, len(whole)))))
    request = aligned(bridge, snapshot, CHAT)
    assert request.refusal is None
    every = aligned(bridge, whole, CHAT).aligned.alignment
    gone = (every.index >= 30) & (every.index < 60)
    inside = torch.zeros(request.cached, dtype=torch.bool)
    ends = request.encoding.spans[: request.cached, 1]
    for passage in request.passages:
        inside |= (ends > passage.start) & (ends <= passage.end)
    assert int((gone & inside).sum()) > 5
    assert not bool(request.aligned.alignment.covered[gone & inside].any())


def test_a_saved_chat_crosses_as_well(bridge, tmp_path):
    snapshot = capture(bridge.sender, messages=CHAT)
    snapshot.save(tmp_path / "chat.kv")
    first = bridge.handoff(snapshot, messages=CHAT)
    again = bridge.handoff(KVSnapshot.load(tmp_path / "chat.kv"), messages=CHAT)
    assert first.decision == again.decision
    for one, other in zip(first.layers, again.layers, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_longer_chat_goes_on_from_the_shorter_one(bridge):
    snapshot = capture(bridge.sender, messages=CHAT[:2])
    handoff = bridge.handoff(snapshot, messages=CHAT)
    assert handoff.decision.accepted
    text, passages = bridge.receiver.render(CHAT), bridge.receiver.chat(CHAT).passages
    last = len(text[: passages[2].start])
    recomputed = [s for s in handoff.provenance.spans if s.fidelity == "approximate"]
    ends = bridge.receiver.chat(CHAT).encoding.spans[:, 1]
    assert all(int(ends[s.tokens[1] - 1]) <= last for s in recomputed)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_edited_turn_ends_what_is_used(bridge, number):
    """Nothing behind the first difference is read, even where messages are alike again."""
    kept = CHAT[number]["content"][:20]
    snapshot = capture(bridge.sender, messages=edited(number, kept + "… something else."))
    request = aligned(bridge, snapshot, CHAT)
    passage = request.passages[number]
    if request.refusal is not None:
        assert request.refusal.reason == "text_mismatch"
        assert number == 1
        return
    covered = request.aligned.alignment.covered
    ends = request.encoding.spans[: request.cached, 1]
    assert int(ends[covered].max()) <= passage.start + len(kept)
    handoff = bridge.handoff(snapshot, messages=CHAT)
    assert handoff.decision.predicted_flops <= WORTH * prefill_flops(
        bridge.receiver.geometry, len(handoff.ids)
    )


def test_dropped_reasoning_ends_what_is_used(bridge):
    thinking = edited(2, "<think>" + SENTENCES[5] + "</think>" + CHAT[2]["content"])
    snapshot = capture(bridge.sender, messages=thinking)
    bridge.receiver.tokenizer.chat_template = ANSWER_ONLY
    try:
        request = aligned(bridge, snapshot, thinking)
        assert SENTENCES[5] not in request.text
        covered = request.aligned.alignment.covered
        ends = request.encoding.spans[: request.cached, 1]
        assert int(ends[covered].max()) <= request.passages[1].end
    finally:
        bridge.receiver.tokenizer.chat_template = RECEIVERS


def test_another_chat_altogether_is_refused(bridge):
    other = [{"role": "user", "content": SENTENCES[6] + " " + SENTENCES[7]}]
    decision = bridge.handoff(capture(bridge.sender, messages=other), messages=CHAT).decision
    assert (decision.verdict, decision.reason) == ("discard", "text_mismatch")
    shared = [CHAT[0], *other]
    decision = bridge.handoff(capture(bridge.sender, messages=shared), messages=CHAT).decision
    assert decision.reason in ("text_mismatch", "ungated")


@pytest.mark.parametrize("content", [SENTENCES[5], SENTENCES[4][:24] + " not.", "No."])
def test_an_edited_last_turn_is_exact_in_one_model(own, content):
    """The common beginning is the model's own, and so is what is computed on top of it."""
    model = own.receiver
    snapshot = capture(model, messages=edited(3, content))
    handoff = own.handoff(snapshot, messages=CHAT)
    assert handoff.decision.reason == "exact", str(handoff.decision)
    assert handoff.provenance.fidelity == "exact"
    assert_exact(handoff, continued(model, model.chat(CHAT).encoding.ids))
    own_flops = prefill_flops(model.geometry, len(handoff.ids))
    assert handoff.decision.predicted_flops < WORTH * own_flops


def test_regenerating_an_answer_goes_on_from_the_question(own):
    model = own.receiver
    longer = [*CHAT, {"role": "assistant", "content": SENTENCES[6]}]
    snapshot = capture(model, messages=longer)
    handoff = own.handoff(snapshot, messages=CHAT)
    assert handoff.decision.reason == "exact"
    assert_exact(handoff, continued(model, model.chat(CHAT).encoding.ids))


def test_an_edited_plain_text_goes_on_from_its_beginning(own):
    text = " ".join(SENTENCES[:5])
    other = " ".join((*SENTENCES[:4], SENTENCES[6]))
    handoff = own.handoff(capture(own.sender, other), text)
    assert handoff.decision.reason == "exact"
    assert_exact(handoff, continued(own.receiver, own.receiver.encode(text).ids))
    early = " ".join((SENTENCES[0][:12], *SENTENCES[2:5]))
    decision = own.handoff(capture(own.sender, early), text).decision
    assert (decision.verdict, decision.reason) == ("discard", "text_mismatch")
    assert "prefill" in decision.detail


def test_rows_behind_holes_are_never_taken_for_exact(own):
    """With rows missing, what stood between them is unknown: only the digest could tell."""
    snapshot = capture(own.sender, messages=edited(1, "Nothing at all."))
    rows = torch.cat((torch.arange(8), torch.arange(40, len(snapshot))))
    assert own.handoff(snapshot.select(rows), messages=CHAT).decision.reason == "text_mismatch"


def test_a_digest_that_does_not_hold_is_refused(own):
    snapshot = replace(capture(own.sender, messages=edited(3, "No.")), text_digest="0" * 64)
    assert own.handoff(snapshot, messages=CHAT).decision.reason == "text_mismatch"


def test_tails_are_recomputed_as_in_any_request(bridge):
    snapshot = capture(bridge.sender, messages=CHAT)
    handoff = bridge.handoff(snapshot, messages=CHAT, repair=RepairPlan(tail=16))
    assert handoff.decision.accepted
    last = handoff.provenance.at(3, handoff.cached - 1)
    assert last == "repaired"
