"""Three splits by document, and what a fit says of the documents it used."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

from kvbridge.duplicates import NearDuplicates
from kvbridge.errors import DataError
from kvbridge.fitting.data import SPLITS, Document
from kvbridge.geometry import hash_draw, short_name

MOST_NAMES = 200_000
"""Documents whose names a fit keeps; of a larger corpus none are kept."""


def split_of(document: Document, fractions: tuple[float, float, float]) -> str:
    """Its own split, or one drawn by a hash of its group: the same for every text of a document, on
    every machine."""
    if document.split is not None:
        return document.split
    draw = hash_draw(document.group)
    train, validation, _ = fractions
    if draw < train:
        return "train"
    return "validation" if draw < train + validation else "test"


@dataclass(frozen=True)
class LeftOut:
    """What a fit did so that splits share no text: rows left out per split because another split
    saw their text first, documents left out per split as near duplicates of another split's, and
    documents that went to an earlier near duplicate's split."""

    rows: dict[str, int] = field(default_factory=dict)
    documents: dict[str, int] = field(default_factory=dict)
    moved: int = 0

    def lines(self) -> list[str]:
        """What there is to say, a line each."""
        lines = []
        for what, counts in (("rows", self.rows), ("documents", self.documents)):
            if some := {split: count for split, count in counts.items() if count}:
                named = ", ".join(f"{count:,} of {split}" for split, count in some.items())
                why = "their text begins" if what == "rows" else "they nearly repeat"
                lines.append(f"{what} left out: {named} ({why} documents of another split)")
        if self.moved:
            lines.append(
                f"{self.moved:,} documents joined the split of an earlier one that they nearly "
                "repeat"
            )
        return lines


class Splits:
    """Documents per split as they stream by: counts, and a digest of what was used. Refuses a group
    in two splits. `left_out` and `moved` count near duplicates."""

    def __init__(self, duplicates: NearDuplicates | None = None) -> None:
        self.left_out = dict.fromkeys(SPLITS, 0)
        self.moved = 0
        self._duplicates = duplicates
        self.documents = dict.fromkeys(SPLITS, 0)
        self.rows = dict.fromkeys(SPLITS, 0)
        self._group_split: dict[str, str] = {}
        self._digest = hashlib.sha256()

    def place(self, document: Document, fractions: tuple[float, float, float]) -> str | None:
        """The split of a document, which is counted in it; None where it is left out.

        A near duplicate of an earlier document goes where that one went. Where its own split is
        stated, or other texts of its document already stand in it, it is left out instead.
        Raises DataError as `add` does.
        """
        known = self._group_split.get(document.group)
        split = document.split or known or split_of(document, fractions)
        earlier = None
        if self._duplicates is not None:
            earlier = self._duplicates.repeated(document.text, split)
        if earlier is not None and earlier != split:
            if document.split is not None or known is not None:
                self.left_out[split] += 1
                return None
            self.moved += 1
            split = earlier
        self.add(document, split)
        return split

    def add(self, document: Document, split: str) -> None:
        """Counts one document; raises DataError when its group already stands in another split."""
        known = self._group_split.setdefault(document.group, split)
        if known != split:
            raise DataError(
                f"document {document.group!r} stands in {known} and in {split}; split by document"
            )
        self.documents[split] += 1
        line = json.dumps([document.id, split, document.text], ensure_ascii=True)
        self._digest.update(hashlib.sha256(line.encode()).digest())

    def check(self) -> None:
        """Raises DataError when a split is empty."""
        empty = [s for s in SPLITS if not self.documents[s]]
        if empty:
            raise DataError(
                "expected documents in train, validation and test, "
                f"found none for {', '.join(empty)} (of {sum(self.documents.values())}"
                f"{self._repeated()}); "
                "give more documents or mark their split"
            )

    def _repeated(self) -> str:
        repeats = self.moved + sum(self.left_out.values())
        return f", and {repeats} that nearly repeat one of another split" if repeats else ""

    def fitted_on(self) -> tuple[str, ...] | None:
        """Names, as `short_name`, of the documents that weights and λ are from; None where they are
        too many to keep."""
        names = {short_name(group) for group, split in self._group_split.items() if split != "test"}
        return tuple(sorted(names)) if len(names) <= MOST_NAMES else None

    @property
    def digest(self) -> str:
        """Digest of ids, splits and texts in order."""
        return self._digest.hexdigest()

    def to_json(self) -> dict[str, dict[str, int]]:
        """Documents and rows per split."""
        return {s: {"documents": self.documents[s], "rows": self.rows[s]} for s in SPLITS}
