"""Where the messages of a chat stand in its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbridge.geometry import digest_text


@dataclass(frozen=True)
class Passage:
    """The text of one message, or of one part of it, in a rendered chat.

    Characters `[start, end)` without the white space around it; start and end are −1 where the
    template does not write it as it was given. `digest` is of these characters, or of the given
    text where they were not found.
    """

    start: int
    end: int
    digest: str

    @property
    def located(self) -> bool:
        """Whether it stands in the text."""
        return self.start >= 0


def find_passages(
    text: str, contents: Sequence[str], anchors: Mapping[int, str]
) -> tuple[Passage, ...]:
    """Each of `contents` in `text`, in order: behind its anchor (what a template writes between it
    and the one before), else where it stands only once."""
    passages: list[Passage] = []
    cursors: tuple[int, ...] = (0,)
    for number, content in enumerate(contents):
        wanted = content.strip()
        start = _place(text, content, anchors.get(number), cursors)
        if start < 0:
            passages.append(Passage(-1, -1, digest_text(wanted)))
            continue
        end = start + len(wanted)
        passages.append(Passage(start, end, digest_text(wanted)))
        # The template may have kept the white space after the text, or taken it away.
        behind = content[len(content.rstrip()) :]
        kept = text.startswith(behind, end)
        cursors = (end + len(behind), end) if behind and kept else (end,)
    return tuple(passages)


def _place(text: str, content: str, anchor: str | None, cursors: tuple[int, ...]) -> int:
    """Where `content`, without the white space around it, begins in `text` after one of
    `cursors`: behind its anchor, else where it stands only once; −1 where neither."""
    wanted = content.strip()
    before = content[: len(content) - len(content.lstrip())]
    if anchor is not None:
        for cursor in cursors:
            for kept in (before, ""):
                if text.startswith(anchor + kept + wanted, cursor):
                    return cursor + len(anchor) + len(kept)
        wanted_at = _only(text, anchor + wanted, cursors[-1])
        if wanted_at >= 0:
            return wanted_at + len(anchor)
    return _only(text, wanted, cursors[-1])


def _only(text: str, wanted: str, start: int) -> int:
    """Where `wanted` stands in `text` from `start` on; −1 where it does not, or more than once."""
    first = text.find(wanted, start)
    return first if first >= 0 and text.find(wanted, first + 1) < 0 else -1
