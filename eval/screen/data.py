"""Texts and rows of a screening: what pairs are fitted on, and what is held out of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvbridge.errors import EvalError
from kvbridge.eval.tasks import kind_of
from kvbridge.eval.tasks.items import RawItem, split_rows, text_of
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.data import Document, read_documents
from kvbridge.fitting.splits import split_of

SEQUENCES = 16


@dataclass(frozen=True)
class FleetData:
    """What a screening uses: documents to fit on (with their splits, or split by `fractions`) and
    rows to make held-out items of."""

    documents: Sequence[Document]
    raws: Sequence[RawItem]
    fractions: tuple[float, float, float] = FitConfig().fractions

    def probe(self) -> list[Document]:
        """The first documents of the training split: predictors never see what is reported."""
        train = (d for d in self.documents if split_of(d, self.fractions) == "train")
        return list(itertools.islice(train, SEQUENCES))


def screen_data(source: str, fractions: tuple[float, float, float]) -> FleetData:
    """Documents and held-out rows of one source, each row in one split: texts as they are,
    questions with their answer as running text. Rows of the test split become items, those that say
    nothing usable among them, which are counted out later. Raises DataError, and EvalError for a
    row of no known kind."""
    raws: list[RawItem] = []

    def documents() -> Iterator[Document]:
        for split, raw in split_rows(source):
            try:
                text = text_of(raw)
            except EvalError:
                text = ""
            document = Document(raw.id, text, raw.document, split)
            if split_of(document, fractions) == "test":
                kind_of(raw.body)
                raws.append(raw)
            yield document

    return FleetData(list(read_documents(documents())), raws, fractions)
