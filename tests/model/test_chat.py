"""`messages=` gives the ids of `apply_chat_template`, says where each message stands, and refuses in
one line of ours what a template cannot render."""

from __future__ import annotations

import pytest
import torch

from kvbridge import Bridge, KVSnapshot, capture
from kvbridge.errors import KVBridgeError, UsageError
from tests.models import tiny, tiny_causal, wrapped

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<assistant>{% endif %}"
PARTS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endif %}\n{% endfor %}" + ASK
)
TEMPLATES = {
    "plain": TURNS + ASK,
    "bos": "{{ bos_token }}" + TURNS + ASK,
    "bos as text": "<s>" + TURNS + ASK,
    "eos after turns": TURNS.replace("\n", "{{ eos_token }}") + ASK,
    "own system prompt": "<system>You are helpful.</system>\n" + TURNS + ASK,
    "system in the first turn": (
        "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.s = m.content + '\n\n' %}{% else %}<{{ m.role }}>{{ ns.s }}{{ m.content }}"
        "</{{ m.role }}>{% set ns.s = '' %}{% endif %}{% endfor %}" + ASK
    ),
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    + TURNS
    + ASK,
    "documents": "{% for d in documents or [] %}({{ d.title }}: {{ d.text }}){% endfor %}"
    + TURNS
    + ASK,
    "thinking": TURNS
    + ASK
    + "{% if not enable_thinking | default(true) %}<think></think>{% endif %}",
    "parts": PARTS,
}
CHAT = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "  When did the bell ring? \n"},
    {"role": "assistant", "content": "Never."},
    {"role": "user", "content": "And the snow: when did it go? Die Mühle steht still 👩‍👩‍👧."},
]
CONTINUED = [*CHAT, {"role": "assistant", "content": "On the eleventh of"}]
TOOL = {
    "type": "function",
    "function": {"name": "ring", "description": "Rings.", "parameters": {"type": "object"}},
}
OPTIONS = {
    "nothing": {},
    "no generation prompt": {"add_generation_prompt": False},
    "tools": {"tools": [TOOL]},
    "documents": {"documents": [{"title": "Ledger", "text": "four sacks of barley"}]},
    "no thinking": {"enable_thinking": False},
    "another template": {"chat_template": "{% for m in messages %}* {{ m.content }}\n{% endfor %}"},
    "a variable": {"mood": "brief"},
    "continued": {"continue_final_message": True},
    "sanitised": {"sanitize_control_tokens": True},
}


@pytest.fixture(scope="module", params=["bytes", "bos", "metaspace"])
def model(request):
    """Its own tokenizer, which tests may change; `bos` adds one to every text by itself."""
    return wrapped(tiny_causal("llama", 0), request.param, name=f"tiny-{request.param}")


def own_ids(model, messages, options):
    arguments = {"add_generation_prompt": not options.get("continue_final_message"), **options}
    encoded = model.tokenizer.apply_chat_template(
        messages, return_tensors="pt", return_dict=True, **arguments
    )
    return encoded["input_ids"][0]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_the_prompt_is_the_templates_own(model, template, options):
    model.tokenizer.chat_template = template
    messages = CONTINUED if options.get("continue_final_message") else CHAT
    own = own_ids(model, messages, options)
    chat = model.chat(messages, options)
    assert torch.equal(chat.encoding.ids, own)
    ends = chat.encoding.spans[:, 1]
    assert bool((ends.diff() >= 0).all())
    assert int(ends[-1]) <= len(chat.text)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_capture_and_handoff_take_the_same_prompt(model, options):
    model.tokenizer.chat_template = TEMPLATES["bos"]
    messages = CONTINUED if options.get("continue_final_message") else CHAT
    own = own_ids(model, messages, options)
    snapshot = capture(model, messages=messages, template=options)
    bridge = Bridge(None, sender=model, receiver=model)
    handoff = bridge.handoff(snapshot, messages=messages, template=options)
    assert torch.equal(snapshot.token_ids, own)
    assert torch.equal(handoff.ids, own)
    assert handoff.decision.reason == "exact"


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_every_message_is_found(model, template):
    model.tokenizer.chat_template = template
    chat = model.chat(CHAT)
    told = [chat.text[p.start : p.end] for p in chat.passages]
    assert told == [message["content"].strip() for message in CHAT]


HARD = {
    "a role as content": ["user", "assistant", "user"],
    "repeated": ["Yes", "Yes", "Yes"],
    "one character": ["<", ">", "u"],
    "empty": ["First", "", "Last"],
    "inside another": ["bell", "the bell rang", "bell"],
    "spaces around": [" a ", "\n\nb\n", "\tc"],
}


@pytest.mark.parametrize("contents", HARD.values(), ids=HARD)
@pytest.mark.parametrize("template", ["plain", "bos", "own system prompt", "parts"])
def test_hard_contents_are_found_where_they_stand(model, template, contents):
    model.tokenizer.chat_template = TEMPLATES[template]
    roles = ["user", "assistant", "user"]
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    chat = model.chat(messages)
    places = iter(chat.passages)
    for role, content in zip(roles, contents, strict=True):
        if not content:
            continue
        passage = next(places)
        assert chat.text[passage.start : passage.end] == content.strip()
        before = chat.text[: passage.start].rstrip()
        assert before.endswith((f"<{role}>", f"[{role}]"))
    assert next(places, None) is None


def test_parts_of_a_message_are_found_one_by_one(model):
    model.tokenizer.chat_template = TEMPLATES["parts"]
    parts = [{"type": "text", "text": "The river"}, {"type": "text", "text": "rose twice"}]
    chat = model.chat([{"role": "user", "content": parts}])
    assert [chat.text[p.start : p.end] for p in chat.passages] == ["The river", "rose twice"]


def test_what_a_template_alters_stands_nowhere(model):
    model.tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }} {% endfor %}"
    chat = model.chat([{"role": "user", "content": "bell"}, {"role": "user", "content": "SNOW"}])
    assert [passage.located for passage in chat.passages] == [False, True]


def test_a_template_that_drops_reasoning_has_no_passage_for_it(model):
    model.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    )
    messages = [
        {"role": "assistant", "content": "<think>Hm.</think>It is green."},
        {"role": "user", "content": "Why?"},
    ]
    chat = model.chat(messages)
    assert [passage.located for passage in chat.passages] == [False, True]


REFUSING = {
    "raises": "{{ raise_exception('System role not supported') }}",
    "undefined": "{{ messages[0].nothing.at.all }}",
    "syntax": "{% for m in messages %}",
    "unknown filter": "{{ messages | nonsense }}",
    "type": "{{ messages[0].content + 1 }}",
    "key": "{{ {}['a']['b'] }}",
    "division": "{{ 1 // 0 }}",
    "method": "{{ messages[0].content.nothing() }}",
    "json": "{{ raise_exception | tojson }}",
    "range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "sandbox": "{{ messages.__class__.__mro__ }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "dict of templates": {"other": "x"},
}


@pytest.mark.parametrize("template", REFUSING.values(), ids=REFUSING)
def test_what_a_template_raises_is_one_line_of_ours(model, template):
    model.tokenizer.chat_template = TEMPLATES["plain"]
    snapshot = capture(model, messages=CHAT)
    bridge = Bridge(None, sender=model, receiver=model)
    model.tokenizer.chat_template = template
    for attempt in (
        lambda: capture(model, messages=CHAT),
        lambda: bridge.handoff(snapshot, messages=CHAT),
        lambda: KVSnapshot.from_cache(
            snapshot.to_cache(model), model, snapshot.token_ids, messages=CHAT
        ),
    ):
        with pytest.raises(UsageError) as refused:
            attempt()
        assert "\n" not in str(refused.value)
        assert "chat template" in str(refused.value)


WRONG = {
    "none": [],
    "a text": "Hello",
    "a mapping": {"role": "user", "content": "Hello"},
    "texts": ["Hello"],
    "a batch": [CHAT, CHAT],
    "no role": [{"content": "Hello"}],
    "a number as role": [{"role": 1, "content": "Hello"}],
    "a number": [{"role": "user", "content": 3}],
    "bytes": [{"role": "user", "content": b"Hello"}],
    "a picture": [{"role": "user", "content": [{"type": "image", "url": "x.png"}]}],
    "texts as parts": [{"role": "user", "content": ["Hello"]}],
    "half an emoji": [{"role": "user", "content": "\ud83d"}],
}


@pytest.mark.parametrize("messages", WRONG.values(), ids=WRONG)
def test_messages_of_another_form_are_refused(model, messages):
    model.tokenizer.chat_template = TEMPLATES["plain"]
    with pytest.raises(UsageError) as refused:
        capture(model, messages=messages)
    assert "\n" not in str(refused.value)


WRONG_OPTIONS = {
    "no mapping": ["tools"],
    "numbers as names": {1: 2},
    "tokenize": {"tokenize": False},
    "return_tensors": {"return_tensors": "np"},
    "padding": {"padding": True},
    "tools that are none": {"tools": [3]},
    "tools without a list": {"tools": 3},
    "documents that are none": {"documents": ["x"]},
    "two ways to end": {"continue_final_message": True, "add_generation_prompt": True},
    "a template of another name": {"chat_template": 3},
    "an untyped function": {"tools": [lambda x: x]},
    "a field to continue that is not there": {"continue_final_message": "nothing"},
}


@pytest.mark.parametrize("options", WRONG_OPTIONS.values(), ids=WRONG_OPTIONS)
def test_options_of_another_form_are_refused(model, options):
    model.tokenizer.chat_template = TEMPLATES["plain"]
    with pytest.raises(UsageError) as refused:
        capture(model, messages=CHAT, template=options)
    assert "\n" not in str(refused.value)


def test_a_template_without_messages_is_misuse(model):
    snapshot = capture(model, "Snow lay on the northern pass.")
    for attempt in (
        lambda: capture(model, "Snow", template={}),
        lambda: Bridge(None, sender=model, receiver=model).handoff(snapshot, "Snow", template={}),
    ):
        with pytest.raises(UsageError, match="template="):
            attempt()


def test_messages_are_not_modified(model):
    model.tokenizer.chat_template = TEMPLATES["plain"]
    before = [dict(message) for message in CHAT]
    model.chat(CHAT)
    assert before == CHAT


def test_a_snapshot_keeps_its_messages_in_its_file(model, tmp_path):
    model.tokenizer.chat_template = TEMPLATES["bos"]
    snapshot = capture(model, messages=CHAT)
    snapshot.save(tmp_path / "chat.kv")
    loaded = KVSnapshot.load(tmp_path / "chat.kv")
    assert loaded.passages == snapshot.passages
    assert len(loaded.passages) == len(CHAT)
    capture(model, "Snow lay.").save(tmp_path / "text.kv")
    assert b"passages" not in (tmp_path / "text.kv").read_bytes()


def test_a_grown_cache_keeps_the_messages_and_the_answer(model):
    model.tokenizer.chat_template = TEMPLATES["bos"]
    answer = " Nobody knew. "
    generated = model.tokenizer(answer, add_special_tokens=False)["input_ids"]
    ids = torch.cat((model.chat(CHAT).encoding.ids, torch.tensor(generated)))
    grown = capture(model, input_ids=ids[:-1]).to_cache(model)
    messages = [*CHAT, {"role": "assistant", "content": answer}]
    snapshot = KVSnapshot.from_cache(grown, model, ids, messages=messages)
    assert len(snapshot.passages) == len(messages)
    assert all(passage.located for passage in snapshot.passages)
    text = model.encode_ids(ids)[0]
    last = snapshot.passages[-1]
    assert text[last.start : last.end] == answer.strip()


def test_no_template_is_a_line_that_says_what_to_do():
    model = tiny("qwen3", tokenizer="bytes")
    template, model.tokenizer.chat_template = model.tokenizer.chat_template, None
    try:
        with pytest.raises(KVBridgeError, match="no chat template; pass text="):
            capture(model, messages=CHAT)
    finally:
        model.tokenizer.chat_template = template
