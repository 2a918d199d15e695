"""English prose out of three Debian documentation packages, cut into items and split by HTML page.

A page is a document. What keeps the splits apart: a page's split follows from a hash of its name alone, items of
a page never share a sentence, and a paragraph with a sentence that also stands on another page is dropped from both
(licence notes, passages that manuals copy from each other).
"""

import hashlib
import json
import re
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

from kvbridge.errors import DataError

__all__ = ["PACKAGES", "Document", "Package", "cut", "documents", "pages", "paragraphs", "rows", "split_of"]


@dataclass(frozen=True)
class Package:
    """A Debian package and the folder of its English HTML pages."""

    name: str
    root: str


PACKAGES = (
    Package("debian-handbook", "usr/share/doc/debian-handbook/html/en-US/"),
    Package("python3.11-doc", "usr/share/doc/python3.11/html/"),
    Package("linux-doc-6.1", "usr/share/doc/linux-doc-6.1/html/"),
)

# Translations, indexes, lists of changes, and pages that are one long table.
_SKIPPED_PAGE = re.compile(
    r"translations/|whatsnew/|(.*/)?(genindex.*|py-modindex|search|index|contents|changelog|license|copyright"
    r"|maintainers|kernel-parameters|abi-.*)\.html$"
)
_LARGEST_PAGE_BYTES = 500_000  # larger ones are generated API listings

SHARES = (("test", 0.30), ("validation", 0.42))  # cumulative; the rest is train
ITEM_CHARS = (1800, 2400)
ITEMS_PER_PAGE = {"train": 4, "validation": 2, "test": 2}
SHORTEST_PARAGRAPH = 60


class Document(NamedTuple):
    """One page: its name (package/path) and its paragraphs in reading order."""

    name: str
    paragraphs: list[str]


def pages(deb: Path, package: Package) -> Iterator[tuple[str, str]]:
    """(package/path, HTML) of every page of a .deb, read as a stream: nothing is unpacked to disk."""
    command = ["dpkg-deb", "--fsys-tarfile", str(deb)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                path = name.removeprefix(package.root)
                if path == name or not path.endswith(".html") or _SKIPPED_PAGE.match(path):
                    continue
                if member.isfile() and member.size <= _LARGEST_PAGE_BYTES and (file := archive.extractfile(member)):
                    yield f"{package.name}/{path}", file.read().decode("utf-8", errors="replace")
    if process.returncode:
        raise DataError(f"{deb} should be a Debian package, but dpkg-deb cannot read it; delete it and run again")


class _Prose(HTMLParser):
    """Collects the text of <p> and <div class="para">, outside code, tables, headings, lists of links and navigation."""

    SILENT = frozenset("pre table script style nav header footer head dt h1 h2 h3 h4 h5 h6 figure svg sup form".split())
    SILENT_CLASSES = frozenset(
        "titlepage toc toctree-wrapper footnotes related sphinxsidebar highlight literal-block mediaobject"
        " versionchanged versionadded deprecated table navfooter navheader breadcrumb contents docnav".split()
    )
    # Sphinx and docbook close what they open; these need no end tag or break no paragraph.
    VOID = frozenset("br img hr input meta link col area base wbr source".split())
    INLINE = frozenset(
        "a abbr acronym b cite code em i kbd q samp small span strong sub tt u var wbr br img dfn".split()
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self._buffer: list[str] = []
        self._open: list[tuple[str, str]] = []  # (tag, role: "prose", "silent" or "")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.VOID:
            self._buffer.append(" ")
            return
        classes = set((dict(attrs).get("class") or "").split())
        if tag in self.SILENT or classes & self.SILENT_CLASSES or "headerlink" in classes:
            role = "silent"
        elif tag == "p" or (tag == "div" and "para" in classes):
            role = "prose"
        else:
            role = ""
        if tag not in self.INLINE:
            self._flush()
        self._open.append((tag, role))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.INLINE:
            self._flush()
        depth = next((i for i in range(len(self._open) - 1, -1, -1) if self._open[i][0] == tag), None)
        if depth is not None:
            del self._open[depth:]

    def handle_data(self, data: str) -> None:
        roles = {role for _, role in self._open}
        if "prose" in roles and "silent" not in roles:
            self._buffer.append(data)

    def close(self) -> None:
        super().close()
        self._flush()

    def _flush(self) -> None:
        text = " ".join("".join(self._buffer).split())
        self._buffer.clear()
        if text:
            self.found.append(text)


_COMMON = frozenset("the of to and a in is that for it as with be are this on by or an if can not which from".split())
_ENDING = re.compile(r"[.!?:][\"'”’)\]]*$")
_CHANGES = re.compile(r"(new|changed|deprecated|added|removed) in version|copyright|source code:|©", re.I)


def is_prose(text: str) -> bool:
    """Whether a paragraph reads as English sentences: long enough, ended, mostly letters, a fifth common words."""
    if len(text) < SHORTEST_PARAGRAPH or not _ENDING.search(text) or _CHANGES.match(text):
        return False
    letters = sum(char.isascii() and (char.isalpha() or char == " ") for char in text)
    words = re.findall(r"[a-z]+", text.lower())
    common = sum(word in _COMMON for word in words)
    return letters >= 0.85 * len(text) and len(words) >= 10 and common >= 0.2 * len(words)


def paragraphs(html: str) -> list[str]:
    """The prose paragraphs of an HTML page, entities resolved, white space collapsed."""
    start = max(html.find('role="main"'), 0)
    parser = _Prose()
    parser.feed(html[html.find(">", start) + 1 if start else 0 :])
    parser.close()
    return [text for text in parser.found if is_prose(text)]


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?:]) (?=[\"'“(]?[A-Z])", text)


def _key(sentence: str) -> bytes:
    """What two sentences share when they differ in numbers, punctuation and case only."""
    return hashlib.blake2b("".join(re.findall(r"[a-z]+", sentence.lower())).encode(), digest_size=8).digest()


def documents(found: Iterable[tuple[str, list[str]]]) -> list[Document]:
    """Documents without the paragraphs they share: one that has a sentence of another page is dropped from both."""
    collected = [Document(name, texts) for name, texts in found]
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
    """Items of ITEM_CHARS characters: consecutive sentences, paragraphs kept apart; the rest of a page is dropped."""
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


def rows(found: Iterable[Document]) -> dict[str, list[dict[str, str]]]:
    """Per split the rows {id, document, kind, text}; kind is the package.

    First every page's first item in the order of a hash of the page's name, then the second ones, and so on: the
    first n rows of a split come from as many pages and as mixed packages as there can be.
    """
    ordered = sorted(found, key=lambda document: hashlib.sha256(f"order {document.name}".encode()).digest())
    result: dict[str, list[dict[str, str]]] = {"train": [], "validation": [], "test": []}
    ranked: dict[str, list[tuple[int, dict[str, str]]]] = {split: [] for split in result}
    for document in ordered:
        split = split_of(document.name)
        for rank, text in enumerate(cut(document.paragraphs)[: ITEMS_PER_PAGE[split]]):
            kind = document.name.split("/", 1)[0]
            row = {"id": f"{document.name}#{rank}", "document": document.name, "kind": kind, "text": text}
            ranked[split].append((rank, row))
    for split, items in ranked.items():
        result[split] = [row for _, row in sorted(items, key=lambda item: item[0])]
    return result


def write(debs: Mapping[str, Path], folder: Path) -> dict[str, int]:
    """Writes {train,validation,test}.jsonl into ``folder`` from the .deb of each package; returns the row counts."""
    found = documents(
        (name, paragraphs(html)) for package in PACKAGES for name, html in sorted(pages(debs[package.name], package))
    )
    counts = {}
    for split, items in rows(found).items():
        lines = (json.dumps(row, ensure_ascii=False) for row in items)
        (folder / f"{split}.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        counts[split] = len(items)
    return counts
