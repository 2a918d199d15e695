"""The tokenizer and the shipped texts of the demo.

The texts are split by document of the sources; none of theirs is among those the models are trained
on.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from kvbridge.demo import MODELS, path, texts
from recipes.demo import corpus, tokenizer
from recipes.demo.documents import compose, drill, sentences, text_of
from recipes.demo.recall import items

SEED = 2026
DOCUMENT_CHARS = (950, 1250)
MINIMUM_TOKENS = 320
PER_DOCUMENT = {"train": 4, "validation": 4, "test": 4}
PROSE_CHARS = 900


def tokenizer_texts(
    austen: Sequence[corpus.Document], bible: Sequence[corpus.Document]
) -> list[str]:
    """What the merges are learnt from: all of the base prose, some of the Bible, 400 drills."""
    rng = Random(0)
    base = [" ".join(sentences(d.paragraphs)) for d in austen if d.split == "base"]
    base += [" ".join(d.paragraphs) for d in bible if d.split == "base"][:150]
    return base + [text_of(drill(rng, 10)) for _ in range(400)]


def rows(
    documents: Sequence[corpus.Document], split: str, tokens: Tokenizer
) -> Iterator[dict[str, Any]]:
    """Up to PER_DOCUMENT texts of each document of a split, begun at even distances; neighbours may
    share sentences."""
    count = PER_DOCUMENT[split]
    for document in [d for d in documents if d.split == split]:
        pool = sentences(document.paragraphs)
        last = max(
            (i for i in range(len(pool)) if sum(map(len, pool[i:])) >= PROSE_CHARS), default=0
        )
        for index in range(count):
            rng = Random(f"{SEED}/{split}/{document.id}/{index}")
            pieces, _ = compose(
                rng, pool, last * index // (count - 1), rng.randint(*DOCUMENT_CHARS)
            )
            text = text_of(pieces)
            if len(tokens.encode(text).ids) >= MINIMUM_TOKENS:
                yield {
                    "id": f"{document.id}#{index}",
                    "document": document.id,
                    "kind": "mixed",
                    "text": text,
                }


def register(documents: Sequence[corpus.Document], limit: int) -> Iterator[dict[str, Any]]:
    """Held-out pieces of the register that ``tuned`` is tuned on: plain text, no tasks."""
    for document in [d for d in documents if d.split == "test"][:limit]:
        text = " ".join(document.paragraphs)[:1600].rsplit(" ", 1)[0]
        yield {"id": f"{document.id}#0", "document": document.id, "kind": "register", "text": text}


def write(target: Path, written: Sequence[dict[str, Any]]) -> None:
    """One JSON object a line, under a temporary name first."""
    temporary = target.with_suffix(".tmp")
    temporary.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in written), encoding="utf-8"
    )
    os.replace(temporary, target)
    print(
        f"{target.name}: {len(written)} rows, {len({row['document'] for row in written})} documents"
    )


def build(sources: Path, with_tokenizer: bool) -> None:
    """Writes the shipped texts; with `with_tokenizer` also a new tokenizer, which makes the trained
    models useless."""
    root = corpus.unpack(sources)
    austen, bible = corpus.documents(corpus.austen(root)), corpus.documents(corpus.bible(root))
    if with_tokenizer:
        trained = tokenizer.train(tokenizer_texts(austen, bible))
        for name in MODELS:
            path(name).mkdir(parents=True, exist_ok=True)
            tokenizer.save(trained, path(name))
    tokens = Tokenizer.from_file(str(path("receiver") / "tokenizer.json"))
    texts("train").parent.mkdir(exist_ok=True)
    for split in ("train", "validation", "test"):
        write(texts(split), list(rows(austen, split, tokens)))
    asked_about = [document for document in austen if document.split == "recall"]
    write(texts("recall"), list(items(asked_about, tokens, SEED)))
    write(texts("register"), list(register(bible, 60)))
