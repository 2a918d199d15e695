"""Recall items: a context, a question about it, and the one token that answers it."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from tokenizers import Tokenizer

from recipes.demo.corpus import Document
from recipes.demo.documents import prose, sentences, text_of
from recipes.demo.tasks import ASKERS, KINDS, Ledger

NEAR, FAR = 20, 180
PER_DOCUMENT = 10
OPTIONS = 4


def items(
    documents: Sequence[Document], tokenizer: Tokenizer, seed: int
) -> Iterator[dict[str, Any]]:
    """Up to PER_DOCUMENT items of each document, with answers NEAR to FAR tokens back."""
    for document in documents:
        pool, start = sentences(document.paragraphs), 0
        for index in range(PER_DOCUMENT):
            rng = Random(f"{seed}/recall/{document.id}/{index}")
            item, start = _item(rng, pool, start, tokenizer)
            if item is not None:
                yield {"id": f"{document.id}#r{index}", "document": document.id, **item}
            if start >= len(pool):
                start = 0


def _item(
    rng: Random, pool: Sequence[str], start: int, tokenizer: Tokenizer
) -> tuple[dict[str, Any] | None, int]:
    """Prose, facts, prose, a question. The other options are values of the same relation told in
    the same context."""
    ledger = Ledger(rng)
    kinds = rng.sample(sorted(KINDS), 2)
    asked = rng.choice(kinds)
    before, start = prose(rng, pool, start, rng.randint(60, 200))
    told = [*ledger.tell([asked], OPTIONS), *ledger.tell(kinds, rng.randint(1, 3))[1:]]
    after, start = prose(rng, pool, start, rng.randint(20, 320))
    fact = rng.choice([fact for fact in ledger.facts if fact.kind == asked])
    context = before + "\n" + text_of(told) + "\n" + after + "\n"
    question = rng.choice(ASKERS) + KINDS[asked].ask.format(k=fact.key)
    ids = tokenizer.encode(context + question + fact.value).ids
    places = [position for position, token in enumerate(ids[:-1]) if token == ids[-1]]
    if len(places) != 1 or not NEAR <= len(ids) - 1 - places[0] <= FAR:
        return None, start
    others = [f.value for f in ledger.facts if f.kind == asked and f.value != fact.value]
    return {
        "kind": asked,
        "context": context,
        "question": question,
        "answer": fact.value,
        "distance": len(ids) - 1 - places[0],
        "options": sorted([fact.value, *rng.sample(others, OPTIONS - 1)]),
        "chance": round(1 / len(KINDS[asked].values), 4),
    }, start
