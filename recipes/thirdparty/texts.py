"""English prose out of three Debian documentation packages, cut into items and split by HTML page.

A page is a document. What keeps the splits apart: a page's split follows from a hash of its name
alone, items of a page never share a sentence, and a paragraph with a sentence that also stands on
another page is dropped from both (licence notes, passages that manuals copy from each other).
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from recipes.thirdparty.html import PACKAGES, pages, paragraphs

__all__ = ["Document", "cut", "documents", "rows", "split_of", "write"]

SHARES = (("test", 0.30), ("validation", 0.42))  # cumulative; the rest is train
ITEM_CHARS = (1800, 2400)
ITEMS_PER_PAGE = {"train": 4, "validation": 2, "test": 2}


class Document(NamedTuple):
    """One page: its name (package/path) and its paragraphs in reading order."""

    name: str
    paragraphs: list[str]


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?:]) (?=[\"'“(]?[A-Z])", text)


def _key(sentence: str) -> bytes:
    """What two sentences share when they differ in numbers, punctuation and case only."""
    return hashlib.blake2b(
        "".join(re.findall(r"[a-z]+", sentence.lower())).encode(), digest_size=8
    ).digest()


def documents(site: Iterable[tuple[str, list[str]]]) -> list[Document]:
    """Documents without what they share: a paragraph with a sentence of another page is dropped
    from both."""
    collected = [Document(name, texts) for name, texts in site]
    owners: dict[bytes, set[int]] = defaultdict(set)
    keyed: list[list[list[bytes]]] = []
    for number, document in enumerate(collected):
        keyed.append([[_key(s) for s in sentences(p) if len(s) >= 40] for p in document.paragraphs])
        for keys in keyed[-1]:
            for key in keys:
                owners[key].add(number)

    result = []
    for document, keys_of in zip(collected, keyed, strict=True):
        seen: set[bytes] = set()
        kept = []
        for text, keys in zip(document.paragraphs, keys_of, strict=True):
            if all(len(owners[key]) == 1 and key not in seen for key in keys):
                kept.append(text)
                seen.update(keys)
        result.append(Document(document.name, kept))
    return result


def cut(texts: Iterable[str]) -> list[str]:
    """Items of ITEM_CHARS characters: consecutive sentences, paragraphs kept apart, the rest
    dropped."""
    low, high = ITEM_CHARS
    items: list[str] = []
    current = ""
    for text in texts:
        separator = "\n\n"
        for sentence in sentences(text):
            if len(sentence) > high - low - len(separator):
                continue
            current += (separator if current else "") + sentence
            separator = " "
            if len(current) >= low:
                items.append(current)
                current = ""
    return items


def split_of(document: str) -> str:
    """train, validation or test: a function of the document's name alone."""
    share = int.from_bytes(hashlib.sha256(document.encode()).digest()[:4], "big") / 2**32
    return next((name for name, upper in SHARES if share < upper), "train")


def rows(site: Iterable[Document]) -> dict[str, list[dict[str, str]]]:
    """Per split the rows {id, document, kind, text}; kind is the package.

    First every page's first item in the order of a hash of the page's name, then the second ones,
    and so on: the first n rows of a split come from as many pages as there can be, in a mixed
    order.
    """
    ordered = sorted(
        site, key=lambda document: hashlib.sha256(f"order {document.name}".encode()).digest()
    )
    ranked: dict[str, list[tuple[int, dict[str, str]]]] = {split: [] for split in ITEMS_PER_PAGE}
    for document in ordered:
        split = split_of(document.name)
        for rank, text in enumerate(cut(document.paragraphs)[: ITEMS_PER_PAGE[split]]):
            kind = document.name.split("/", 1)[0]
            row = {
                "id": f"{document.name}#{rank}",
                "document": document.name,
                "kind": kind,
                "text": text,
            }
            ranked[split].append((rank, row))
    return {
        split: [row for _, row in sorted(items, key=lambda item: item[0])]
        for split, items in ranked.items()
    }


def write(debs: Mapping[str, Path], folder: Path) -> dict[str, int]:
    """Writes {train,validation,test}.jsonl into ``folder`` from each package's .deb; returns row
    counts."""
    site = documents(
        (name, paragraphs(html))
        for package in PACKAGES
        for name, html in sorted(pages(debs[package.name], package))
    )
    counts = {}
    for split, items in rows(site).items():
        lines = (json.dumps(row, ensure_ascii=False) for row in items)
        (folder / f"{split}.jsonl").write_text(
            "".join(line + "\n" for line in lines), encoding="utf-8"
        )
        counts[split] = len(items)
    return counts
