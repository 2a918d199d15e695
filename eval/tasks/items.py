"""What is asked of every condition: items, read from local files or the Hub, checked once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvbridge import demo
from kvbridge.errors import EvalError
from kvbridge.fitting.data import answer_texts, row_names, stream_rows
from kvbridge.fitting.folders import split_named
from kvbridge.fitting.json_rows import Unreadable, lone_surrogate
from kvbridge.fitting.skipped import Skipped
from kvbridge.geometry import digest_text


@dataclass(frozen=True)
class Item:
    """One item of a task.

    `prompt` is what the sender has read; `answers` what may follow it (the first is scored by
    likelihood), `options` the choices of a multiple choice with `answers[0]` among them. `chance`
    is what guessing scores, `document` the cluster it is resampled with.
    """

    id: str
    document: str
    task: str
    prompt: str
    answers: tuple[str, ...]
    options: tuple[str, ...] = ()
    chance: float | None = None
    conversation: str | None = None


@dataclass(frozen=True)
class RawItem:
    """A row as read, before a task makes an item of it: `text` alone, or `prompt` with answers."""

    id: str
    document: str
    body: dict[str, Any]


def split_rows(source: str, skipped: Skipped | None = None) -> Iterator[tuple[str | None, RawItem]]:
    """(split or None, row) out of a file, a folder, or a Hub dataset; a row's own column `split`
    counts where it names one. Rows that cannot be read, are no objects or bear an id a second time
    are left out and counted in `skipped` (modified); raises DataError where they are too many."""
    skipped = skipped or Skipped()
    seen: set[tuple[str | None, str]] = set()
    for index, (split, name, place, row) in enumerate(stream_rows(source)):
        skipped.read()
        reason = _unusable(row)
        if reason is not None:
            skipped.add(place, reason)
            continue
        identity, _ = row_names(row, f"{name}#{index}")
        split = split_named(row.get("split")) or split
        if (split, identity) in seen:
            skipped.add(place, f"item id {identity!r} stands twice; ids must be unique")
            continue
        seen.add((split, identity))
        yield split, RawItem(identity, _document_of(row, identity), row)
    skipped.close()


def _unusable(row: Any) -> str | None:
    """Why a value is no row of an evaluation."""
    if isinstance(row, Unreadable):
        return row.reason
    if not isinstance(row, dict):
        return f"expected an object, found {type(row).__name__}"
    if any(lone_surrogate(text) for value in row.values() for text in _texts_in(value)):
        return "expected text, found half a character (a lone surrogate)"
    return None


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(entry)


def _document_of(row: dict[str, Any], identity: str) -> str:
    """The cluster of a row: its `document`, else one for all questions about an equal context, else
    its own id."""
    if row.get("document") not in (None, ""):
        return str(row["document"])
    context = row.get("context") or row.get("prompt")
    if isinstance(context, str) and not isinstance(row.get("text"), str):
        return f"context {digest_text(context)[:16]}"
    return identity


def data_digest(raws: Iterable[RawItem]) -> str:
    """Digest of rows in any order: ids, documents and contents."""
    lines = sorted(
        digest_text(json.dumps([raw.id, raw.document, raw.body], sort_keys=True, default=str))
        for raw in raws
    )
    return digest_text("".join(lines))


def read_raw(source: str, skipped: Skipped | None = None) -> Iterator[RawItem]:
    """Rows to evaluate on: where splits are named, those of `test` alone. `skipped` and DataError
    as with `split_rows`."""
    return (raw for split, raw in split_rows(source, skipped) if split in (None, "test"))


def asks(body: dict[str, Any]) -> bool:
    """Whether a row has an answer, answers or options, so that it is a question."""
    return bool(body.get("answers") or body.get("options")) or body.get("answer") is not None


def prompt_and_answers(raw: RawItem) -> tuple[str, tuple[str, ...]]:
    """Prompt and accepted answers of a question row; with options and no answer, `label` says which
    of them it is. Raises EvalError.

    Context, question and answer are one text as they stand: nothing is put between them or taken
    from their ends. A separator belongs to one of them.
    """
    body = raw.body
    if isinstance(body.get("prompt"), str):
        prompt = body["prompt"]
    else:
        prompt = "".join(body[n] for n in ("context", "question") if isinstance(body.get(n), str))
    accepted = body.get("answers") if body.get("answers") is not None else body.get("answer")
    answers = answer_texts(accepted)
    if accepted is None and body.get("options"):
        options, label = options_of(raw), body.get("label")
        if type(label) is not int or not 0 <= label < len(options):
            raise EvalError(
                f"{raw.id}: expected a label from 0 to {len(options) - 1}, found {label!r}"
            )
        answers = (options[label],)
    no_text = [answer for answer in answers if not isinstance(answer, str)]
    if no_text:
        kind = type(no_text[0]).__name__
        raise EvalError(f"{raw.id}: expected the answer as text, found {no_text[0]!r:.40} ({kind})")
    if not prompt or not answers or not all(answers):
        raise EvalError(
            f"{raw.id}: expected a context or prompt and a non-empty answer, found {sorted(body)}"
        )
    return prompt, answers


def options_of(raw: RawItem) -> tuple[str, ...]:
    """Choices of a multiple-choice row; raises EvalError unless they are two or more different
    texts."""
    given = raw.body.get("options") or ()
    if not isinstance(given, list | tuple):
        raise EvalError(f"{raw.id}: expected options as a list of texts, found {given!r:.200}")
    options = tuple(given)
    if (
        len(options) < 2
        or not all(isinstance(o, str) and o for o in options)
        or len(set(options)) != len(options)
    ):
        raise EvalError(f"{raw.id}: expected two or more different options, found {options!r:.200}")
    return options


def question_item(raw: RawItem, task: str, options: tuple[str, ...] = ()) -> Item:
    """The item of a question row; its chance is the row's own, else one in `options`. Raises
    EvalError."""
    prompt, answers = prompt_and_answers(raw)
    chance = chance_of(raw)
    if chance is None and options:
        chance = 1 / len(options)
    return Item(
        raw.id,
        raw.document,
        task,
        prompt,
        answers,
        options,
        chance=chance,
        conversation=conversation_of(raw),
    )


def chance_of(raw: RawItem) -> float | None:
    """What guessing scores, where the row says it; raises EvalError where it is no share (NaN,
    negative, above 1)."""
    chance = raw.body.get("chance")
    if chance is None:
        return None
    if isinstance(chance, bool) or not isinstance(chance, int | float) or not 0 <= chance <= 1:
        raise EvalError(f"{raw.id}: expected a chance from 0 to 1, found {chance!r:.40}")
    return float(chance)


def conversation_of(raw: RawItem) -> str | None:
    """The row's conversation id."""
    conversation = raw.body.get("conversation")
    return None if conversation is None else str(conversation)


def text_of(raw: RawItem) -> str:
    """What a row says as running text: its text, or a question with its answer. Raises
    EvalError."""
    text = raw.body.get("text")
    if isinstance(text, str):
        return text
    prompt, answers = prompt_and_answers(raw)
    return prompt + answers[0]


def demo_rows(split: str) -> Iterable[RawItem]:
    """Held-out rows that ship with kvbridge: `test` or `recall`."""
    return read_raw(str(demo.texts(split)))
