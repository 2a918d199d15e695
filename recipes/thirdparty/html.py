"""Prose paragraphs out of the HTML pages of Debian documentation packages."""

import re
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from kvbridge.errors import DataError

__all__ = ["PACKAGES", "Package", "is_prose", "pages", "paragraphs"]


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
    r"translations/|whatsnew/|(.*/)?(genindex.*|py-modindex|search|index|contents|changelog"
    r"|license|copyright|maintainers|kernel-parameters|abi-.*)\.html$"
)
_LARGEST_PAGE_BYTES = 500_000  # larger ones are generated API listings
SHORTEST_PARAGRAPH = 60


def pages(deb: Path, package: Package) -> Iterator[tuple[str, str]]:
    """(package/path, HTML) of every page of a .deb, read as a stream: nothing is unpacked to disk.

    Raises DataError if dpkg-deb is missing or cannot read the file.
    """
    try:
        process = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=subprocess.PIPE)
    except FileNotFoundError as error:
        raise DataError(f"reading {deb.name} needs dpkg-deb: install the package dpkg") from error
    try:
        with process, tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                path = name.removeprefix(package.root)
                if path == name or not path.endswith(".html") or _SKIPPED_PAGE.match(path):
                    continue
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None and member.size <= _LARGEST_PAGE_BYTES:
                    yield f"{package.name}/{path}", file.read().decode("utf-8", errors="replace")
    except tarfile.TarError as error:
        raise DataError(
            f"{deb} should be a Debian package, but cannot be read ({error}); delete it"
        ) from error


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


class _Prose(HTMLParser):
    """Collects the text of <p> and <div class="para">, outside code, tables, headings and
    navigation."""

    SILENT = _set(
        "pre table script style nav header footer head dt h1 h2 h3 h4 h5 h6 figure svg sup form"
    )
    SILENT_CLASSES = _set(
        "titlepage toc toctree-wrapper footnotes related sphinxsidebar highlight literal-block "
        "mediaobject"
        " table contents versionchanged versionadded deprecated navfooter navheader breadcrumb"
        " docnav headerlink"
    )
    VOID = _set("br img hr input meta link col area base wbr source")  # never closed
    INLINE = _set("a abbr acronym b cite code dfn em i kbd q samp small span strong sub tt u var")

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.texts: list[str] = []
        self._buffer: list[str] = []
        self._open: list[tuple[str, str]] = []  # (tag, role: "prose", "silent" or "")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.VOID:
            self._buffer.append(" ")
            return
        classes = set((dict(attrs).get("class") or "").split())
        if tag in self.SILENT or classes & self.SILENT_CLASSES:
            role = "silent"
        elif tag == "p" or (tag == "div" and "para" in classes):
            role = "prose"
        else:
            role = ""
        if tag not in self.INLINE:
            self._flush()
        self._open.append((tag, role))

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID:  # <br/> is reported as a start and an end
            return
        if tag not in self.INLINE:
            self._flush()
        depth = next(
            (i for i in range(len(self._open) - 1, -1, -1) if self._open[i][0] == tag), None
        )
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
            self.texts.append(text)


_COMMON = _set(
    "the of to and a in is that for it as with be are this on by or an if can not which from"
)
_ENDING = re.compile(r"[.!?:][\"'”’)\]]*$")
_CHANGES = re.compile(
    r"(new|changed|deprecated|added|removed) in version|copyright|source code:|©", re.I
)


def is_prose(text: str) -> bool:
    """Whether a paragraph reads as English: long, ended, mostly letters, a fifth of it common
    words."""
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
    return [text for text in parser.texts if is_prose(text)]
