"""Task passages whose answers stand earlier in the text: facts, then questions about them.

A passage is a list of pieces, each a text with the flag *recallable*: whether what came before
determines it. Every key and value is one token of the demo tokenizer (with its leading space), so
that an answer is one token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random


@dataclass(frozen=True)
class Piece:
    text: str
    recallable: bool = False


def _words(text: str) -> tuple[str, ...]:
    return tuple(" " + word for word in text.split())


NAMES = _words(
    "Emma Fanny Elizabeth Jane Marianne Catherine Harriet Anne Thomas Edmund Edward Henry John "
    "Mary William Isabella"
    " Lucy Lydia Charles Walter Frank Maria Julia Louisa Charlotte James Tom Eleanor Henrietta"
    " Kitty Susan Robert"
    " Frederick Margaret Eliza Martin George Philip Sophia Augusta Peter Anna Rose Ellen Hugh"
    " Ralph Laura Alice"
)
PLACES = _words(
    "house room garden park cottage hall church village town parlour kitchen library street road "
    "theatre shop"
    " chapel barn field wood meadow river bridge tower cellar stable orchard mill market school"
    " court inn"
)
OBJECTS = _words(
    "letter book table chair horse picture card instrument piano carriage chaise note bed window "
    "door fire"
    " lamp key ring watch box glass cup knife bell coat hat shoe basket candle clock coin map pen"
    " flute drum"
    " ribbon purse mirror rope spoon apple cake egg"
)
QUALITIES = _words(
    "proud idle happy clever quiet silly gentle vain kind wise rude brave cold merry sad shy "
    "honest jealous"
    " pretty young poor rich lazy bold calm cruel civil eager noble plain sweet tall weak"
)
NUMBERS = _words(
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen"
    " eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)
VOCABULARY = tuple(sorted({*NAMES, *PLACES, *OBJECTS, *QUALITIES, *NUMBERS}))


@dataclass(frozen=True)
class Kind:
    """How one relation is told and asked. ``fact`` and ``ask`` are formatted with k (key) and v
    (value)."""

    keys: tuple[str, ...]
    values: tuple[str, ...]
    fact: str
    ask: str
    end: str


KINDS: dict[str, Kind] = {
    "called": Kind(
        NAMES, QUALITIES, "They called{k}{v}.", " What did they call{k}? They called{k}", "."
    ),
    "place": Kind(NAMES, PLACES, "{k} is in the{v}.", " Where is{k}? In the", "."),
    "holds": Kind(NAMES, OBJECTS, "{k} has the{v}.", " What has{k}? The", "."),
    "owner": Kind(OBJECTS, NAMES, " The{k} belongs to{v}.", " Whose is the{k}? It belongs to", "."),
    "price": Kind(
        OBJECTS, NUMBERS, " The{k} cost{v} pounds.", " What did the{k} cost? It cost", " pounds."
    ),
}
OPENERS = ("Remember this:", "It was known:", "Hear this:", "Note:")
ASKERS = ("Question:", "Asked again:", "Tell me:", "Answer:")


@dataclass(frozen=True)
class Fact:
    kind: str
    key: str
    value: str

    def told(self) -> str:
        text = KINDS[self.kind].fact.format(k=self.key, v=self.value)
        return text if text.startswith(" ") else " " + text


@dataclass
class Ledger:
    """What one text has told so far; keys and values of a kind are never used twice, so every
    answer is unique."""

    rng: Random
    facts: list[Fact] = field(default_factory=list)
    lists: list[tuple[str, ...]] = field(default_factory=list)
    _asked: list[Fact] = field(default_factory=list)

    def fresh(self, kind: str) -> Fact | None:
        spec = KINDS[kind]
        same = [fact for fact in self.facts if fact.kind == kind]
        keys = sorted(set(spec.keys) - {fact.key for fact in same})
        values = sorted(set(spec.values) - {fact.value for fact in same})
        if not keys or not values:
            return None
        return Fact(kind, self.rng.choice(keys), self.rng.choice(values))

    def tell(self, kinds: Sequence[str], count: int) -> list[Piece]:
        """A paragraph of ``count`` new facts of the given kinds."""
        pieces = [Piece(self.rng.choice(OPENERS))]
        for _ in range(count):
            fact = self.fresh(self.rng.choice(list(kinds)))
            if fact is not None:
                self.facts.append(fact)
                pieces.append(Piece(fact.told()))
        return pieces

    def ask(self, count: int) -> list[Piece]:
        """A paragraph of ``count`` questions about facts told, those not yet asked first."""
        pieces = [Piece(self.rng.choice(ASKERS))]
        for _ in range(count):
            waiting = [fact for fact in self.facts if fact not in self._asked] or self.facts
            fact = self.rng.choice(waiting)
            self._asked.append(fact)
            spec = KINDS[fact.kind]
            pieces += [Piece(spec.ask.format(k=fact.key)), Piece(fact.value, True), Piece(spec.end)]
        return pieces

    def enumerate(self, count: int) -> list[Piece]:
        """A paragraph that lists ``count`` objects."""
        self.lists.append(tuple(self.rng.sample(OBJECTS, count)))
        return [Piece("The list:" + ",".join(self.lists[-1]) + ".")]

    def relist(self) -> list[Piece]:
        """The latest list, said again: from its second word on, every word is determined."""
        words = self.lists[-1]
        pieces = [Piece("Again the list:" + words[0])]
        for word in words[1:]:
            pieces += [Piece(","), Piece(word, True)]
        return [*pieces, Piece(".")]


def quote(rng: Random, sentence: str) -> list[Piece]:
    """A sentence of the text, read again word for word; its first three words are free, the rest is
    determined."""
    head = " ".join(sentence.split(" ")[:3])
    return [Piece("Read it again: " + head), Piece(sentence[len(head) :], True)]
