"""What is asked of every condition: items, read from local files or the Hub, checked once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvbridge import demo
from kvbridge.errors import DataError, EvalError
from kvbridge.fitting.data import stream_rows


@dataclass(frozen=True)
class Item:
    """One item of a task. `prompt` is what the sender has read; `answers` what may follow it (the first is scored by
    likelihood), `options` the choices of a multiple choice with `answers[0]` among them. `chance`: what guessing scores.
    `document` is the cluster it is resampled with.
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


def read_raw(source: str) -> Iterator[RawItem]:
    """Rows of a .jsonl, .parquet or .txt file, a folder, or a Hub dataset; where splits are named, those of `test` alone.
    Raises DataError on duplicate ids."""
    seen: set[str] = set()
    for index, (split, name, row) in enumerate(stream_rows(source)):
        if not isinstance(row, dict):
            raise DataError(f"{name}#{index}: expected an object, found {type(row).__name__}")
        identity = str(row.get("id") or f"{name}#{index}")
        if split not in (None, "test"):
            continue
        if identity in seen:
            raise DataError(f"{name}: item id {identity!r} stands twice; ids must be unique")
        seen.add(identity)
        document = row.get("document")
        yield RawItem(identity, identity if document is None else str(document), row)


def kind_of(body: dict[str, Any]) -> str:
    """Task of a row by its columns: options → multiple_choice, question and answer → recall, answers → qa, text →
    continuation; an explicit `task` wins."""
    if isinstance(body.get("task"), str):
        return body["task"]
    if body.get("answers"):
        return "qa"
    if body.get("answer") is not None:
        return "recall"
    if body.get("options"):
        return "multiple_choice"
    if isinstance(body.get("text"), str):
        return "continuation"
    raise EvalError(f"expected a row with text, or with context, question and answer, found columns {', '.join(body)}")


def prompt_and_answers(raw: RawItem) -> tuple[str, tuple[str, ...]]:
    """Prompt (context and question as they stand) and accepted answers of a question row; raises EvalError."""
    body = raw.body
    if isinstance(body.get("prompt"), str):
        prompt = body["prompt"]
    else:
        prompt = "".join(body[n] for n in ("context", "question") if isinstance(body.get(n), str))
    found = body.get("answers") if body.get("answers") is not None else body.get("answer")
    answers = tuple(found) if isinstance(found, (list, tuple)) else (found,)
    if not prompt or not answers or not all(isinstance(a, str) and a for a in answers):
        raise EvalError(f"{raw.id}: expected a context or prompt and a non-empty answer, found {sorted(body)}")
    return prompt, answers


def demo_rows(split: str) -> Iterable[RawItem]:
    """Held-out rows that ship with kvbridge: `test` or `recall`."""
    return read_raw(str(demo.texts(split)))
