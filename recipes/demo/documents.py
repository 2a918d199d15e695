"""Documents as the models see them: prose and task passages in turn, and the rows of tokens they
are trained on.

Row ``index`` of step ``step`` is a function of (seed, step, index): a run that is cut resumes at
its data's very place.
"""

import re
from collections.abc import Sequence
from random import Random

from tokenizers import Tokenizer

from recipes.demo.tasks import KINDS, VOCABULARY, Ledger, Piece, quote

Row = tuple[list[int], list[float]]
RECALL_WEIGHT = 3.0


def sentences(paragraphs: Sequence[str]) -> list[str]:
    """Paragraphs cut after full stops, question and exclamation marks; titles such as "Mr." do not
    end one."""
    cut = (re.split(r"(?<![MDS]r\.)(?<!Mrs\.)(?<=[.!?])\s+", paragraph) for paragraph in paragraphs)
    return [sentence for parts in cut for sentence in parts if sentence]


def prose(rng: Random, pool: Sequence[str], start: int, chars: int) -> tuple[str, int]:
    """Whole sentences from ``pool`` beginning at ``start``: about ``chars`` characters, and the
    next start."""
    taken: list[str] = []
    while start < len(pool) and (not taken or sum(map(len, taken)) < chars):
        taken.append(pool[start])
        start += 1
    text = " ".join(taken)
    return (text if len(text) <= 2 * chars else text[: 2 * chars].rsplit(" ", 1)[0] + "."), start


def compose(rng: Random, pool: Sequence[str], start: int, chars: int) -> tuple[list[Piece], int]:
    """A document of about ``chars`` characters, half prose from ``pool[start:]``, half tasks; and
    the next start.

    Each round: prose, something told, prose, something asked, so that any stretch of the text after
    the first two hundred tokens holds answers that stand before it.
    """
    ledger = Ledger(rng)
    pieces: list[Piece] = []
    quotable: list[str] = []
    kinds = rng.sample(sorted(KINDS), 2)

    def paragraph(parts: list[Piece]) -> None:
        pieces.extend([*parts, Piece("\n")])

    def passage(low: int, high: int) -> None:
        nonlocal start
        text, start = prose(rng, pool, start, rng.randint(low, high))
        quotable.extend(s for s in sentences([text]) if 60 <= len(s) <= 200)
        paragraph([Piece(text)])

    while sum(len(piece.text) for piece in pieces) < chars and start < len(pool):
        if rng.random() < 0.7:
            passage(90, 220)
        paragraph(ledger.tell(kinds, rng.randint(3, 5)))
        if rng.random() < 0.35:
            paragraph(ledger.enumerate(rng.randint(4, 8)))
        passage(120, 300)
        paragraph(ledger.ask(rng.randint(2, 4)))
        if ledger.lists and rng.random() < 0.6:
            paragraph(ledger.relist())
            ledger.lists.clear()
        if quotable and rng.random() < 0.5:
            paragraph(quote(rng, quotable.pop(rng.randrange(len(quotable)))))
    return pieces, start


def drill(rng: Random, facts: int) -> list[Piece]:
    """A dense text: facts, then questions about all of them in another order, and a list twice."""
    ledger = Ledger(rng)
    kinds = rng.sample(sorted(KINDS), rng.randint(1, 3))
    pieces = [*ledger.tell(kinds, facts), Piece("\n"), *ledger.ask(facts), Piece("\n")]
    if rng.random() < 0.4:
        pieces += [
            *ledger.enumerate(rng.randint(4, 10)),
            Piece("\n"),
            *ledger.relist(),
            Piece("\n"),
        ]
    return pieces


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def encode(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> Row:
    """Token ids after <bos>, and each token's weight in the loss: RECALL_WEIGHT where it is
    determined."""
    encoding = tokenizer.encode(text_of(pieces))
    recallable = bytearray()
    for piece in pieces:
        recallable += (b"\1" if piece.recallable else b"\0") * len(piece.text)
    weights = [RECALL_WEIGHT if b > a and recallable[b - 1] else 1.0 for a, b in encoding.offsets]
    return encoding.ids, weights


def associations(rng: Random, ids: Sequence[int], pairs: int) -> Row:
    """Bare key-value tokens, then every key again in another order, its value to be recalled."""
    drawn = rng.sample(ids, 2 * pairs)
    told = list(zip(drawn[::2], drawn[1::2], strict=True))
    asked = rng.sample(told, pairs)
    tokens = [token for pair in (*told, *asked) for token in pair]
    return tokens, [0.0] * (2 * pairs) + [0.0, RECALL_WEIGHT] * pairs


def repeat(rng: Random, ids: Sequence[int], length: int) -> Row:
    """Random tokens, said twice: the second time every one but the first is determined."""
    drawn = [rng.choice(ids) for _ in range(length)]
    return drawn * 2, [0.0] * (length + 1) + [RECALL_WEIGHT] * (length - 1)


class Rows:
    """Training rows of ``length`` tokens, mixed from prose documents, drills and bare copying."""

    def __init__(self, tokenizer: Tokenizer, pools: Sequence[Sequence[str]], seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.pools = [pool for pool in pools if len(pool) > 3]
        self.bos: int = tokenizer.token_to_id("<bos>") or 0
        self.eos: int = tokenizer.token_to_id("<eos>") or 0
        self.words = sorted(
            i for w in VOCABULARY if (i := tokenizer.token_to_id("Ġ" + w[1:])) is not None
        )
        self.any = list(range(max(self.bos, self.eos) + 2, tokenizer.get_vocab_size()))

    def row(
        self, step: int, index: int, length: int, shares: tuple[float, float, float], words: float
    ) -> Row:
        """One row of ``length + 1`` tokens; for ``shares`` and ``words`` see ``recipe.Phase``."""
        rng = Random(f"{self.seed}/{step}/{index}")
        tokens: list[int] = []
        weights: list[float] = []
        while len(tokens) <= length:
            part, loss = self._part(rng, length, shares, words)
            tokens += [*part, self.eos]
            weights += [*loss, 1.0]
        return tokens[: length + 1], weights[: length + 1]

    def _part(
        self, rng: Random, length: int, shares: tuple[float, float, float], words: float
    ) -> Row:
        document, drills, reading = shares
        draw = rng.random()
        if draw < document + reading:
            pool = rng.choice(self.pools)
            start = rng.randrange(max(1, len(pool) - 3))
            if draw < document:
                return encode(
                    self.tokenizer, compose(rng, pool, start, rng.randint(2, 4) * length)[0]
                )
            return encode(self.tokenizer, [Piece(prose(rng, pool, start, 4 * length)[0])])
        if draw < document + reading + drills:
            return encode(self.tokenizer, drill(rng, rng.randint(2, max(2, min(14, length // 26)))))
        ids = self.words if rng.random() < words else self.any
        if rng.random() < 0.5:
            part = associations(rng, ids, rng.randint(4, max(4, min(length // 5, 40))))
        else:
            part = repeat(rng, ids, rng.randint(8, length // 2 - 2))
        return [self.bos, *part[0]], [0.0, *part[1]]
