"""What a chat keeps when it moves to a model with another template: `python -m benchmarks.chats`.

Held-out documents become chats, sentence by sentence; the last turn is the answer that is scored.
The same contents as one plain text stand beside them, under the same conditions.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

import kvbridge
from kvbridge import demo
from kvbridge.asset.folder import load_asset, load_controls
from kvbridge.cache.prefill import capture
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.cli.ending import run_to_the_end
from kvbridge.cli.options import Json
from kvbridge.cli.output import table
from kvbridge.errors import EvalError, UsageError
from kvbridge.eval.conditions.names import condition
from kvbridge.eval.conditions.prompt import Prompt
from kvbridge.eval.conditions.setup import Setup
from kvbridge.eval.statistics.bootstrap import Interval
from kvbridge.eval.statistics.ratios import recovery
from kvbridge.eval.tasks.base import following_ids, likelihood
from kvbridge.eval.tasks.items import Item
from kvbridge.fitting.data import read_documents
from kvbridge.handoff.bridge import Bridge
from kvbridge.handoff.plan import RepairPlan
from kvbridge.handoff.request import Request
from kvbridge.model.model import Model

TEMPLATES = {
    # Words that the demo's texts have, so that the demo's receiver can read it.
    "notes": (
        "{% for m in messages %}{{ 'Answer:' if m.role == 'assistant' else 'Note:' }} "
        "{{ m.content | trim }}\n{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
    ),
    # As published with gemma-3-270m-it, for text: system messages stand in the first user turn.
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}"
        "{% set first = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
        "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{{ '<start_of_turn>' }}"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first else '' }}"
        "{{ m.content | trim }}{{ '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
}
CONDITIONS = (
    "native",
    "sender",
    "translated",
    "no_context",
    "wrong_document",
    "token_only",
    "tail_only",
    "tail_only32",
    "translated_tail32",
)
TURNS, SENTENCES = 6, 2
"""Turns of a chat, the answer among them, and sentences of a turn."""
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
Message = dict[str, str]


@dataclass(eq=False)
class ChatPrompt(Prompt):
    """A prompt whose two sides each have their own template; `item.prompt` is the receiver's
    text."""

    messages: tuple[Message, ...] = ()

    @cached_property
    def ids(self) -> Tensor:
        return self.setup.receiver.chat(self.messages).encoding.ids

    @cached_property
    def snapshot(self) -> KVSnapshot:
        return capture(self.setup.sender, messages=self.messages)

    def request(self, bridge: Bridge, snapshot: KVSnapshot, plan: RepairPlan) -> Request:
        return bridge.request(snapshot, messages=self.messages, repair=plan)


@dataclass(frozen=True)
class Row:
    """One item under one condition: nats of the answer, and the cost as a share of a prefill."""

    form: str
    document: str
    condition: str
    nats: float
    characters: int
    share: float


def chats(data: str, limit: int) -> Iterator[tuple[str, tuple[Message, ...], str]]:
    """Document, messages and the answer, an assistant's turn, of one chat a document."""
    texts: dict[str, list[str]] = {}
    for document in read_documents(data):
        texts.setdefault(document.group, []).append(" ".join(document.text.split()))
    made = 0
    for group, parts in texts.items():
        sentences = _SENTENCE.split(" ".join(parts))
        pieces = range(0, len(sentences) - SENTENCES + 1, SENTENCES)
        turns = [" ".join(sentences[at : at + SENTENCES]) for at in pieces][:TURNS]
        if len(turns) < TURNS:
            continue
        roles = ("user", "assistant") * TURNS
        messages = [
            {"role": role, "content": turn} for role, turn in zip(roles, turns[:-1], strict=False)
        ]
        yield group, tuple(messages), turns[-1]
        made += 1
        if made == limit:
            return


def answer_ids(model: Model, messages: tuple[Message, ...], answer: str) -> Tensor:
    """The model's tokens of the answer as its template writes it, `[tokens]`; raises EvalError
    where they do not stand behind the prompt's."""
    before = model.chat(messages)
    said = (*messages, {"role": "assistant", "content": answer})
    whole = model.chat(said, {"add_generation_prompt": False})
    last, count = whole.passages[-1], len(before.encoding)
    ids = whole.encoding.ids
    if not last.located or ids[:count].tolist() != before.encoding.ids.tolist():
        raise EvalError(
            f"{model.name}: its template writes an answer otherwise than it asks for it"
        )
    inside = whole.encoding.spans[:, 1] <= last.end
    inside[:count] = False
    return ids[inside]


def rows_of(setup: Setup, prompt: Prompt, form: str, names: tuple[str, ...]) -> Iterator[Row]:
    """One item under every condition; nothing where a condition cannot be run on it."""
    answer = prompt.item.answers[0]
    for name in names:
        start = condition(name)(prompt)
        if isinstance(prompt, ChatPrompt):
            ids = answer_ids(start.model, prompt.messages, answer)
        else:
            ids = following_ids(start.model, prompt.item.prompt, answer)
        nats = likelihood(start, ids, len(answer)).loss
        assert nats is not None
        yield Row(form, prompt.item.document, name, nats, len(answer), start.prefill_share)


def measure_rows(setups: dict[str, Setup], data: str, limit: int) -> list[Row]:
    """Every chat in every form: `plain`, and one for each of `setups` (template tokens)."""
    items = list(chats(data, limit))
    rows: list[Row] = []
    for place, (document, messages, answer) in enumerate(items):
        others = [m["content"] for at in range(1, 4) for m in items[(place + at) % len(items)][1]]
        donor = " ".join(others)
        first = next(iter(setups.values()))
        text = " ".join(message["content"] for message in messages)
        forms: dict[str, Prompt] = {
            "plain": Prompt(first, Item(document, document, "", text, (" " + answer,)), donor)
        }
        for name, setup in setups.items():
            item = Item(document, document, "", setup.receiver.render(messages), (answer,))
            forms[name] = ChatPrompt(setup, item, donor, messages=messages)
        try:
            done = [
                row
                for form, prompt in forms.items()
                for row in rows_of(prompt.setup, prompt, form, CONDITIONS)
            ]
        except EvalError:
            # An item counts only where it could be scored in every form.
            continue
        rows += done
    return rows


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """One entry a form and condition: nats per character, recovery with its interval, cost."""
    entries = []
    for form in dict.fromkeys(row.form for row in rows):
        by_name = {
            name: [row for row in rows if (row.form, row.condition) == (form, name)]
            for name in CONDITIONS
        }
        clusters = [row.document for row in by_name["native"]]
        nats = {name: [row.nats for row in held] for name, held in by_name.items()}
        for name, held in by_name.items():
            lost = sum(nats["no_context"]) - sum(nats[name])
            whole = sum(nats["no_context"]) - sum(nats["native"])
            share = recovery(nats[name], nats["native"], nats["no_context"], clusters)
            bounds = [share.low, share.high] if isinstance(share, Interval) else None
            entries.append(
                {
                    "form": form,
                    "condition": name,
                    "loss": sum(nats[name]) / sum(row.characters for row in held),
                    "recovery": lost / whole if whole > 0 else None,
                    "recovery_ci": bounds,
                    "prefill_share": sum(row.share for row in held) / len(held),
                    "n": len(held),
                }
            )
    return entries


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def measure(
    asset: Annotated[
        Path, typer.Argument(help="Folder of the translator, its controls beside it.")
    ],
    sender: Annotated[str, typer.Option(help="Model that held the chat.")] = "demo:sender",
    receiver: Annotated[str, typer.Option(help="Model that takes over.")] = "demo:receiver",
    receiver_template: Annotated[
        str, typer.Option(help="Chat template of the receiver: notes or gemma.")
    ] = "notes",
    data: Annotated[
        str, typer.Option(help="Held-out texts. Without it, the demo's.", show_default=False)
    ] = "",
    chats_wanted: Annotated[int, typer.Option("--chats", help="Chats, one a document.")] = 40,
    as_json: Json = False,
) -> None:
    """Measure what a chat keeps when it moves to a model with another chat template.

    The receiver's own template tokens are recomputed in one form, and translated in another.
    """
    if receiver_template not in TEMPLATES:
        raise UsageError(
            f"expected one of {', '.join(TEMPLATES)} as template, found {receiver_template}"
        )
    giving, taking = kvbridge.load(sender), kvbridge.load(receiver)
    taking.tokenizer.chat_template = TEMPLATES[receiver_template]
    loaded = load_asset(asset)
    controls = load_controls(loaded)
    rows = measure_rows(
        setups(giving, taking, loaded, controls), data or str(demo.texts("test")), chats_wanted
    )
    entries = summary(rows)
    if as_json:
        print(json.dumps(entries))
        return
    shown = [
        [
            entry["form"],
            entry["condition"],
            f"{entry['loss']:.3f}",
            _percent(entry["recovery"], entry["recovery_ci"]),
            f"{entry['prefill_share']:.0%}",
        ]
        for entry in entries
    ]
    title = f"{giving.name} → {taking.name}, {entries[0]['n']} chats"
    table(title, ["form", "condition", "nats/character", "recovery", "of a prefill"], shown)


def setups(sender: Model, receiver: Model, asset: Any, controls: Any) -> dict[str, Setup]:
    """One setup for each way to treat the receiver's template tokens."""
    made = {}
    for tokens in ("recompute", "translate"):
        options: dict[str, Any] = {
            "sender": sender,
            "receiver": receiver,
            "template_tokens": tokens,
        }
        bridges = Bridge(asset, **options), Bridge(controls, **options)
        made[f"chat, {tokens}"] = Setup(sender, receiver, *bridges)
    return made


def _percent(share: float | None, bounds: list[float] | None) -> str:
    if share is None:
        return "–"
    if bounds is None or not all(map(math.isfinite, bounds)):
        return f"{share:.0%}"
    return f"{share:.0%} [{100 * bounds[0]:.0f}, {100 * bounds[1]:.0f}]"


def main() -> None:
    """The program."""
    run_to_the_end(app)


if __name__ == "__main__":
    main()
