"""Three splits by document, and what a fit says of the documents it used."""

from __future__ import annotations

import hashlib
import json

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


class Splits:
    """Documents per split as they stream by: counts, and a digest of what was used. Refuses a group
    in two splits."""

    def __init__(self) -> None:
        self.documents = dict.fromkeys(SPLITS, 0)
        self.rows = dict.fromkeys(SPLITS, 0)
        self._group_split: dict[str, str] = {}
        self._digest = hashlib.sha256()

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
                f"found none for {', '.join(empty)} (of {sum(self.documents.values())}); "
                "give more documents or mark their split"
            )

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
