"""Public-domain prose out of two Debian packages, cut into documents and split by document.

``r-cran-janeaustenr`` holds Jane Austen's six novels as a lazy-load database of R,
``bible-kjv-text`` the King James Bible as windows of Unix ``compress`` data; both formats are read
here without R or bible-kjv.
"""

import hashlib
import itertools
import re
import struct
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("r-cran-janeaustenr", "bible-kjv-text")
NOVELS = (
    "emma",
    "mansfieldpark",
    "northangerabbey",
    "persuasion",
    "prideprejudice",
    "sensesensibility",
)
DOCUMENT_CHARS = 2600

# Cumulative share of documents per split; the rest is what the models are trained on.
SHARES = (("train", 0.16), ("validation", 0.20), ("test", 0.29), ("recall", 0.37))


@dataclass(frozen=True)
class Document:
    """A run of whole paragraphs of one book: the unit by which everything is split."""

    id: str
    split: str
    paragraphs: tuple[str, ...]


def split_of(document_id: str) -> str:
    """The split of a document: a function of its id alone, so that nothing else can move it."""
    share = int.from_bytes(hashlib.sha256(document_id.encode()).digest()[:4], "big") / 2**32
    return next((name for name, upper in SHARES if share < upper), "base")


def unpack(folder: Path) -> Path:
    """The root of the unpacked packages under ``folder``; fetches and unpacks what is missing."""
    root = folder / "root"
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        if not list(folder.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
        if not (root / "usr/share/doc" / package).exists():
            deb = sorted(folder.glob(f"{package}_*.deb"))[-1]
            subprocess.run(["dpkg", "-x", str(deb), str(root)], check=True)
    return root


def austen(root: Path) -> Iterator[tuple[str, list[str]]]:
    """(novel, paragraphs) for each novel. The database is a row of [4-byte length, zlib stream]
    records."""
    data = (root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    position, names = 0, iter(NOVELS)
    while position < len(data):
        stream = zlib.decompressobj()
        record = stream.decompress(data[position + 4 :])
        position = len(data) - len(stream.unused_data)
        yield next(names), _paragraphs("\n".join(_strings(record)))


def _strings(record: bytes) -> Iterator[str]:
    """The strings of a serialised R character vector (XDR, version 3): a header, then flag, length,
    bytes of each."""
    encoding = struct.unpack_from(">I", record, 14)[0]
    position = 18 + encoding + 4
    (count,) = struct.unpack_from(">I", record, position)
    position += 4
    for _ in range(count):
        _, length = struct.unpack_from(">II", record, position)
        yield record[position + 8 : position + 8 + length].decode("utf-8")
        position += 8 + length


def _paragraphs(text: str) -> list[str]:
    text = (
        text.replace("_", "")
        .replace("--", " - ")
        .translate({0x201C: '"', 0x201D: '"', 0x2018: "'", 0x2019: "'"})
    )
    blocks = (re.sub(r"\s+", " ", block).strip() for block in re.split(r"\n\s*\n", text))
    return [
        block
        for block in blocks
        if len(block) > 40 and not re.match(r"(CHAPTER|VOLUME)", block, re.I)
    ]


def bible(root: Path) -> Iterator[tuple[str, list[str]]]:
    """(book, chapters) of the King James Bible; a chapter's verses are joined into one
    paragraph."""
    data = (root / "usr/lib/bible.data").read_bytes()
    windows = struct.unpack_from(">I", data, 0x58)[0]
    offsets = [*struct.unpack_from(f">{windows}I", data, 0x5C), len(data)]
    text = b"".join(_lzw(data[a:b]) for a, b in itertools.pairwise(offsets)).decode("latin-1")
    chapters: dict[tuple[str, str], list[str]] = {}
    for book, chapter, verse in re.findall(r"^(\d?[A-Za-z]+)(\d+):\d+ (.*)$", text, re.M):
        chapters.setdefault((book, chapter), []).append(verse.strip())
    for book in dict.fromkeys(book for book, _ in chapters):
        yield book, [" ".join(verses) for (name, _), verses in chapters.items() if name == book]


def _lzw(data: bytes) -> bytes:
    """Decode one headerless Unix ``compress`` stream: 9 to 16 bits, code 256 clears, widths padded
    to 8 codes."""
    output, table, width = bytearray(), [bytes([i]) for i in range(256)] + [b""], 9
    position = start = 0
    previous: bytes | None = None
    while position + width <= len(data) * 8:
        word = int.from_bytes(data[position >> 3 : (position >> 3) + 4], "little")
        code = (word >> (position & 7)) & ((1 << width) - 1)
        position += width
        clear = code == 256
        if clear:
            table, previous = table[:257], None
        else:
            entry = table[code] if code < len(table) else (previous or b"") + (previous or b"")[:1]
            if previous is not None and len(table) < 1 << 16:
                table.append(previous + entry[:1])
            output += entry
            previous = entry
        if clear or (len(table) >= 1 << width and width < 16):
            position = start = start + -(-(position - start) // (width * 8)) * width * 8
            width = 9 if clear else width + 1
    return bytes(output)


def documents(books: Iterator[tuple[str, list[str]]]) -> list[Document]:
    """Cut books into documents of whole paragraphs of about DOCUMENT_CHARS characters each."""
    cut: list[Document] = []
    for book, paragraphs in books:
        held: list[str] = []
        for index, paragraph in enumerate(paragraphs):
            held.append(paragraph)
            if sum(map(len, held)) >= DOCUMENT_CHARS or index == len(paragraphs) - 1:
                number = sum(document.id.startswith(book + "/") for document in cut)
                name = f"{book}/{number:04d}"
                cut.append(Document(name, split_of(name), tuple(held)))
                held = []
    return cut
