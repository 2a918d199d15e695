"""Generation from a handoff: whatever generate can do, with the tokens it would have had."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, TextStreamer

from kvbridge import Bridge, RepairPlan, capture, generate_many
from kvbridge.errors import UsageError
from tests.handoff.handoffs import identity, renamed
from tests.models import TEXT, random_texts, tiny, tiny_causal, wrapped

KINDS = ("llama", "gemma3", "gpt2", "phi3_sliding", "mistral_sliding")
PROMPT = TEXT[:130]
TEXTS = [TEXT[:130], TEXT[40:70], TEXT, TEXT[10:150]]


def bridged(kind="llama", **changes):
    """A bridge whose every cached value goes through identity maps."""
    receiver = tiny(kind)
    sender = renamed(receiver)
    return Bridge(identity(sender, receiver), sender=sender, receiver=receiver, **changes)


def handed(kind="llama", text=PROMPT, plan=None):
    bridge = bridged(kind)
    return bridge.handoff(capture(bridge.sender, text), text, repair=plan or RepairPlan(layers=0))


def dense(kind="llama", text=PROMPT, **arguments):
    model = tiny(kind)
    ids = model.encode(text).ids[None]
    return model.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **arguments)


class Collected(TextStreamer):
    def __init__(self) -> None:
        super().__init__(tiny("llama").tokenizer, skip_prompt=True)
        self.received: list[int] = []

    def put(self, value):
        self.received += value.flatten().tolist()

    def end(self):
        self.received.append(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_dense_and_can_be_repeated(kind):
    handoff = handed(kind)
    expected = dense(kind, max_new_tokens=16, do_sample=False)
    for _ in range(2):
        assert torch.equal(handoff.generate(16, do_sample=False), expected)


def test_growing_the_cache_leaves_the_handoff_alone():
    handoff = handed("gemma3")
    cache = handoff.cache
    handoff.receiver.model(handoff.remaining_ids.repeat(1, 9), past_key_values=cache)
    assert handoff.cache.get_seq_length() == handoff.cached == len(handoff.ids) - 1


def test_streamer():
    streamer = Collected()
    out = handed().generate(9, do_sample=False, streamer=streamer)
    assert streamer.received == [*out[0].tolist(), -1]


def test_sampling_with_a_seed():
    torch.manual_seed(5)
    sampled = handed().generate(16, do_sample=True, top_p=0.9, temperature=1.3)
    torch.manual_seed(5)
    expected = dense(max_new_tokens=16, do_sample=True, top_p=0.9, temperature=1.3)
    assert torch.equal(sampled, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 2, "do_sample": False},
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
        {"num_return_sequences": 2, "do_sample": True},
    ],
    ids=["beams", "beams_returned", "sequences"],
)
def test_several_sequences(kind, arguments):
    torch.manual_seed(3)
    sequences = handed(kind).generate(10, **arguments)
    torch.manual_seed(3)
    assert torch.equal(sequences, dense(kind, max_new_tokens=10, **arguments))
    assert len(sequences) == arguments.get("num_return_sequences", 1)


def test_beams_asked_for_by_a_generation_config():
    asked = GenerationConfig(num_beams=2, do_sample=False, max_new_tokens=10, pad_token_id=0)
    assert torch.equal(
        handed().generate(10, generation_config=asked), dense(generation_config=asked)
    )


def test_beams_that_are_the_models_default():
    model = wrapped(tiny_causal("llama"))
    model.model.generation_config.num_beams = 2
    handoff = Bridge(None, sender=model, receiver=model).handoff(capture(model, PROMPT), PROMPT)
    ids = handoff.ids[None]
    assert torch.equal(handoff.generate(10), model.model.generate(ids, max_new_tokens=10))


def test_a_cache_that_may_not_be_used_is_misuse():
    """generate would take the cache and then not feed it: silently other tokens."""
    asked = GenerationConfig(use_cache=False)
    for arguments in ({"use_cache": False}, {"generation_config": asked}):
        with pytest.raises(UsageError, match="use_cache"):
            handed().generate(8, **arguments)
        with pytest.raises(UsageError, match="use_cache"):
            generate_many([handed()], 8, **arguments)
    assert torch.equal(handed().generate(8, use_cache=True), dense(max_new_tokens=8))


def test_a_model_that_does_not_cache_by_default_still_uses_the_handoff():
    model = wrapped(tiny_causal("llama"))
    model.model.generation_config.use_cache = False
    handoff = Bridge(None, sender=model, receiver=model).handoff(capture(model, PROMPT), PROMPT)
    assert torch.equal(handoff.generate(8), dense(max_new_tokens=8))


def test_end_of_sequence_stops():
    handoff = handed()
    free = handoff.generate(16, do_sample=False)[0, len(handoff.ids) :]
    stop = int(free[5])
    cut = handoff.generate(16, do_sample=False, eos_token_id=stop)[0, len(handoff.ids) :]
    assert cut.tolist() == free.tolist()[: free.tolist().index(stop) + 1]


def test_text_is_the_continuation_alone():
    handoff = handed()
    out = handoff.generate(8, do_sample=False)[0, len(handoff.ids) :]
    expected = tiny("llama").tokenizer.decode(out, skip_special_tokens=True)
    assert handoff.text(8, do_sample=False) == expected


def test_structured_output_passes_through():
    generated = handed().generate(
        5, do_sample=False, return_dict_in_generate=True, output_scores=True
    )
    expected = dense(
        max_new_tokens=5, do_sample=False, return_dict_in_generate=True, output_scores=True
    )
    assert torch.equal(generated.sequences, expected.sequences)
    assert torch.allclose(torch.stack(generated.scores), torch.stack(expected.scores), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_many_equal_one_by_one(kind):
    bridge = bridged(kind)
    requests = [(capture(bridge.sender, text), text) for text in TEXTS]
    plan = RepairPlan(sinks=2, tail=3, layers=0)
    many = bridge.handoff_many(requests, repair=plan)
    single = [bridge.handoff(*request, repair=plan) for request in requests]
    for one, other, text in zip(many, single, TEXTS, strict=True):
        assert one.decision == other.decision
        assert one.provenance == other.provenance
        assert torch.equal(one.ids, other.ids)
        assert one.layers is not None
        assert other.layers is not None
        for alone, batched in zip(one.layers, other.layers, strict=True):
            assert all(torch.allclose(alone[n], batched[n], atol=1e-5) for n in alone)
        assert torch.equal(
            one.generate(12, do_sample=False), dense(kind, text, max_new_tokens=12, do_sample=False)
        )
    assert len({len(h.ids) for h in many}) == len(TEXTS)
    for row, text in zip(generate_many(many, 12, do_sample=False), TEXTS, strict=True):
        assert torch.equal(row, dense(kind, text, max_new_tokens=12, do_sample=False)[0])


def test_many_with_refused_ones():
    bridge = bridged()
    good, bad = capture(bridge.sender, TEXTS[0]), capture(bridge.receiver, TEXTS[1])
    handoffs = bridge.handoff_many([(bad, TEXTS[1]), (good, TEXTS[0])])
    assert [h.decision.accepted for h in handoffs] == [False, True]
    for row, text in zip(
        generate_many(handoffs, 6, do_sample=False), (TEXTS[1], TEXTS[0]), strict=True
    ):
        assert torch.equal(row, dense(text=text, max_new_tokens=6, do_sample=False)[0])


def test_many_with_beams():
    bridge = bridged()
    handoffs = bridge.handoff_many([(capture(bridge.sender, t), t) for t in TEXTS[:2]])
    continued = generate_many(handoffs, 8, num_beams=2, do_sample=False)
    for row, text in zip(continued, TEXTS[:2], strict=True):
        assert torch.equal(row, dense(text=text, max_new_tokens=8, num_beams=2, do_sample=False)[0])


def test_many_of_nothing():
    assert generate_many([]) == []


def test_many_returns_one_sequence_each():
    handoff = handed()
    with pytest.raises(UsageError, match="num_return_sequences"):
        generate_many([handoff, handoff], 4, num_return_sequences=2, do_sample=True)
    with pytest.raises(UsageError, match="return_dict_in_generate"):
        generate_many([handoff, handoff], 4, return_dict_in_generate=True)


def test_many_of_two_receivers_is_misuse():
    with pytest.raises(UsageError, match="one receiver"):
        generate_many([handed("llama"), handed("gpt2")])


@pytest.mark.parametrize(
    "name",
    [
        "input_ids",
        "inputs",
        "inputs_embeds",
        "attention_mask",
        "past_key_values",
        "cache",
        "position_ids",
    ],
)
def test_arguments_that_the_handoff_decides(name):
    handoff = handed()
    with pytest.raises(UsageError, match=name):
        handoff.generate(4, **{name: None})
    with pytest.raises(UsageError, match=name):
        generate_many([handoff], 4, **{name: None})


def test_messages_use_the_receivers_template():
    bridge = bridged()
    messages = [{"role": "user", "content": "Who painted the door green?"}]
    text = "[user] Who painted the door green?\n[assistant] "
    snapshot = capture(bridge.sender, messages=messages)
    handoff = bridge.handoff(snapshot, messages=messages)
    assert handoff.decision.accepted
    assert torch.equal(handoff.ids, bridge.receiver.encode(text).ids)
    assert torch.equal(
        handoff.generate(8, do_sample=False), dense(text=text, max_new_tokens=8, do_sample=False)
    )


def test_a_longer_conversation_continues_from_the_shorter_ones_cache():
    bridge = bridged()
    first = [{"role": "user", "content": "Who painted the door green?"}]
    longer = [
        *first,
        {"role": "assistant", "content": "Nobody knew."},
        {"role": "user", "content": "And why?"},
    ]
    prefix = bridge.sender.tokenizer.apply_chat_template(first, tokenize=False)
    handoff = bridge.handoff(capture(bridge.sender, prefix), messages=longer)
    assert handoff.decision.accepted
    text = bridge.receiver.render(longer)
    assert torch.equal(
        handoff.generate(8, do_sample=False), dense(text=text, max_new_tokens=8, do_sample=False)
    )


def test_a_template_that_writes_bos_does_not_double_it():
    model = tiny("llama", tokenizer="bos")
    model.tokenizer.chat_template = "<s>{{ messages[0].content }}"
    try:
        ids = model.encode(model.render([{"role": "user", "content": "Snow lay"}])).ids.tolist()
    finally:
        model.tokenizer.chat_template = None
    assert ids[0] == model.tokenizer.bos_token_id
    assert ids.count(model.tokenizer.bos_token_id) == 1
    with pytest.raises(UsageError, match="chat template"):
        model.render([])


def test_given_tokens_are_kept_as_they_are():
    """Tokens that the tokenizer would not have made itself: the continuation is of these very
    tokens."""
    bridge = bridged()
    text = random_texts(1, 120)[0]
    alphabet = [bridge.receiver.tokenizer(c)["input_ids"][0] for c in text[:40]]
    ids = torch.tensor([*alphabet, *bridge.receiver.encode(text[40:]).ids.tolist()])
    assert not torch.equal(ids, bridge.receiver.encode(text).ids)
    snapshot = capture(bridge.sender, input_ids=ids)
    assert torch.equal(snapshot.token_ids, ids)
    handoff = bridge.handoff(snapshot, input_ids=ids, repair=RepairPlan(layers=0))
    assert handoff.decision.accepted
    assert torch.equal(handoff.ids, ids)
    assert handoff.provenance.share("approximate") > 0.5
    expected = tiny("llama").model.generate(ids[None], max_new_tokens=10, do_sample=False)
    assert torch.equal(handoff.generate(10, do_sample=False), expected)


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ({}, 64),
        (
            {
                "generation_config": GenerationConfig(
                    do_sample=False, max_new_tokens=7, eos_token_id=-1
                )
            },
            7,
        ),
        ({"generation_config": GenerationConfig(do_sample=False, eos_token_id=-1)}, 64),
        (
            {
                "max_new_tokens": 5,
                "generation_config": GenerationConfig(max_new_tokens=7, eos_token_id=-1),
            },
            5,
        ),
        ({"max_new_tokens": 5}, 5),
    ],
    ids=["nothing", "config", "config_without", "both", "argument"],
)
def test_the_length_is_what_was_asked_for(arguments, tokens):
    handoff = handed()
    asked = {"eos_token_id": -1, "do_sample": False} if "generation_config" not in arguments else {}
    assert handoff.generate(**arguments, **asked).shape[1] == len(handoff.ids) + tokens
    assert len(generate_many([handoff], **arguments, **asked)[0]) == len(handoff.ids) + tokens


def test_a_total_length_holds_for_one_and_is_refused_for_many():
    handoff = handed()
    total = len(handoff.ids) + 6
    for arguments in (
        {"max_length": total},
        {"generation_config": GenerationConfig(max_length=total)},
    ):
        assert handoff.generate(**arguments, eos_token_id=-1).shape[1] == total
        with pytest.raises(UsageError, match="max_new_tokens"):
            generate_many([handoff], **arguments)


def test_an_empty_prompt_has_nothing_to_go_on_from():
    model = tiny("llama")
    handoff = Bridge(None, sender=model, receiver=model).handoff(capture(model, TEXT[:50]), "")
    assert handoff.decision.verdict == "discard"
    assert handoff.remaining_ids.shape == (1, 0)
    with pytest.raises(UsageError, match="empty"):
        handoff.generate(4)


def test_a_snapshot_of_a_handoff_is_its_own():
    handoff = handed()
    expected = handoff.generate(6, do_sample=False)
    for layer in handoff.snapshot().layers:
        for tensor in layer.values():
            tensor.zero_()
    assert torch.equal(handoff.generate(6, do_sample=False), expected)
