"""A chat as the model's own template renders it, and where each message's text stands in it.

A template is a program that came with a tokenizer: whatever it raises is one line of ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import torch
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
)

from kvbridge.errors import UsageError
from kvbridge.model.passages import Passage, find_passages
from kvbridge.model.text import Encoding, decode, encode, encode_ids, special_prefix

Messages = Sequence[Mapping[str, Any]]
TemplateOptions = Mapping[str, Any]
"""What `apply_chat_template` and the template itself take: `tools`, `documents`, `chat_template`,
`add_generation_prompt`, `continue_final_message`, `enable_thinking`, any other variable."""

OURS = (
    "conversation",
    "messages",
    "tokenize",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "padding",
    "truncation",
    "max_length",
    "tokenizer_kwargs",
)
"""Options of `apply_chat_template` that say what comes back, which is not the caller's to choose."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields in which a message holds its reasoning."""
FOREIGN = (
    TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    DocstringParsingException,
    TypeHintParsingException,
)
"""What a template, or transformers around it, raises over messages and options."""
MARK = "\ue000{}\ue001"
"""Stands for the text of one passage in a rendering that shows what the template itself writes."""
_MARK = re.compile("\ue000(\\d+)\ue001")


@dataclass(frozen=True)
class Chat:
    """The prompt of a chat: `encoding` holds the ids of the tokenizer's own `apply_chat_template`,
    its spans are characters of `text`.

    `text` is what the template writes, without the special tokens that the tokenizer would put
    before a text by itself: they spell nothing, as in `encode`. `contents` are the texts of the
    messages, empty ones left out, `anchors` what the template writes between each of them and the
    one before it, where that is known.
    """

    text: str
    encoding: Encoding
    contents: tuple[str, ...]
    anchors: Mapping[int, str]

    @cached_property
    def passages(self) -> tuple[Passage, ...]:
        """Where each of `contents` stands in `text`."""
        return self.passages_in(self.text)

    def passages_in(self, text: str) -> tuple[Passage, ...]:
        """Where each of `contents` stands in `text`: this chat's, or one that begins or goes on in
        another way, as after a generation."""
        return find_passages(text, self.contents, self.anchors)


def render_chat(
    tokenizer: Any, messages: Messages, options: TemplateOptions | None, name: str
) -> Chat:
    """`messages` under the chat template of `tokenizer`, with the generation prompt unless
    `options` say otherwise. Nothing is modified.

    Raises UsageError, naming the model `name`, where there is no template, where it cannot render
    these messages, and for messages or options of another form.
    """
    arguments = _arguments(options)
    if not getattr(tokenizer, "chat_template", None) and not arguments.get("chat_template"):
        raise UsageError(f"{name} has no chat template; pass text= instead of messages=")
    check_messages(messages)
    if arguments.get("sanitize_control_tokens"):
        # These ids are not those of any text: what they spell is read from them.
        ids = _applied(tokenizer, messages, arguments, name, tokenize=True, return_tensors="pt")
        text, encoding = encode_ids(tokenizer, ids["input_ids"][0])
    else:
        text = _applied(tokenizer, messages, arguments, name, tokenize=False)
        text, encoding = _encoded(tokenizer, text)
    contents = tuple(_texts(messages))
    return Chat(text, encoding, contents, _anchors(tokenizer, messages, arguments, name))


def check_messages(messages: Any) -> None:
    """Raises UsageError unless `messages` is a chat: at least one message, each a mapping with a
    role and, as far as it has content, a text or a list of text parts."""
    if not isinstance(messages, (list, tuple)):
        raise UsageError(
            f"expected messages as a list of mappings, found {type(messages).__name__}"
        )
    if not messages:
        raise UsageError("expected at least one message, found an empty list")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(
                f"messages[{number}]: expected a mapping with role and content, "
                f"found {type(message).__name__}"
            )
        if not isinstance(message.get("role"), str):
            raise UsageError(
                f"messages[{number}]: expected a text as role, found {message.get('role')!r:.40}"
            )
        _check_content(message.get("content"), f"messages[{number}]")


def _check_content(content: Any, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, (list, tuple)):
        raise UsageError(
            f"{where}: expected a text or a list of parts as content, "
            f"found {type(content).__name__}"
        )
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UsageError(
                f"{where}: expected parts of type text with a text, found {kind!r:.40} as part "
                f"{number}; only text is supported"
            )


def _arguments(options: TemplateOptions | None) -> dict[str, Any]:
    """`options` as arguments of `apply_chat_template`."""
    if options is None:
        options = {}
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise UsageError(
            "expected template= as a mapping of names such as tools or enable_thinking, "
            f"found {type(options).__name__}"
        )
    if taken := [key for key in options if key in OURS]:
        raise UsageError(f"template=: kvbridge sets {', '.join(taken)} itself; leave it out")
    for key in ("tools", "documents"):
        if not isinstance(options.get(key), (list, tuple, type(None))):
            raise UsageError(
                f"template=: expected {key} as a list, found {type(options[key]).__name__}"
            )
    continued = bool(options.get("continue_final_message"))
    arguments = {"add_generation_prompt": not continued, **options}
    if continued and arguments["add_generation_prompt"]:
        raise UsageError(
            "template=: continue_final_message goes on with the last message, "
            "add_generation_prompt with a new one; leave one out"
        )
    return arguments


def _applied(
    tokenizer: Any, messages: Messages, arguments: dict[str, Any], name: str, **form: Any
) -> Any:
    """`apply_chat_template`, whose own exceptions become UsageError."""
    chat = [dict(message) for message in messages]
    try:
        return tokenizer.apply_chat_template(chat, **arguments, **form)
    except FOREIGN as error:
        said = " ".join(str(error).split())[:200] or "no reason given"
        raise UsageError(
            f"{name}: its chat template cannot render these messages: {said} "
            f"({type(error).__name__}); change the messages or template=, or pass text="
        ) from None


def _encoded(tokenizer: Any, rendered: str) -> tuple[str, Encoding]:
    """The text and the tokens of what a template wrote, as transformers tokenises it: nothing is
    added to it."""
    encoding = encode(tokenizer, rendered, special=False)
    prefix = special_prefix(tokenizer)
    spelt = _spelt_prefix(tokenizer)
    begins = encoding.ids[: len(prefix)].tolist() == prefix
    if not prefix or not begins or not rendered.startswith(spelt):
        return rendered, encoding
    spans = (encoding.spans - len(spelt)).clamp_min(0)
    return rendered.removeprefix(spelt), Encoding(encoding.ids, spans)


def _spelt_prefix(tokenizer: Any) -> str:
    """How a template writes the special tokens that the tokenizer puts before every text."""
    return decode(tokenizer, torch.tensor(special_prefix(tokenizer), dtype=torch.int64))


def _fields(message: Mapping[str, Any]) -> list[str]:
    """The fields of a message that hold text, in the order of templates: reasoning, content."""
    reasoning = [key for key in REASONING if isinstance(message.get(key), str)]
    return [*reasoning[:1], "content"]


def _texts(messages: Messages) -> list[str]:
    """The texts that messages are made of, in order, those of white space alone left out."""
    texts: list[str] = []
    for message in messages:
        for field in _fields(message):
            content = message.get(field) or ()
            if isinstance(content, str):
                texts.append(content)
            else:
                texts += [part["text"] for part in content]
    return [text for text in texts if text.strip()]


def _anchors(
    tokenizer: Any, messages: Messages, arguments: dict[str, Any], name: str
) -> dict[int, str]:
    """What the template writes between the texts: a rendering with a mark in place of each. Texts
    whose mark it does not write once and in order have none."""
    marked = _marked(messages)
    try:
        rendered = _applied(tokenizer, marked, arguments, name, tokenize=False)
    except UsageError:
        # It rendered the messages themselves; it wants something of their texts.
        return {}
    pieces = _MARK.split(rendered)
    order = [int(number) for number in pieces[1::2]]
    if order != sorted(set(order)):
        return {}
    anchors = dict(zip(order, pieces[::2], strict=False))
    if 0 in anchors:
        anchors[0] = anchors[0].removeprefix(_spelt_prefix(tokenizer))
    return anchors


def _marked(messages: Messages) -> list[dict[str, Any]]:
    """The messages with a mark in place of each text."""
    numbers = count()

    def mark(text: str) -> str:
        return MARK.format(next(numbers)) if text.strip() else text

    marked = []
    for message in messages:
        copy = dict(message)
        for field in _fields(message):
            content = message.get(field)
            if isinstance(content, str):
                copy[field] = mark(content)
            elif content:
                copy[field] = [{**part, "text": mark(part["text"])} for part in content]
        marked.append(copy)
    return marked
