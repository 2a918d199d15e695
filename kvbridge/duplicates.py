"""Texts that nearly repeat an earlier one, told as they stream by: MinHash LSH finds candidates,
and what each text says after their common beginning decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from datasketch import MinHash, MinHashLSH
from numpy.typing import NDArray

NEAR = 0.8
"""Share of a text's pieces that an earlier text holds, from which on it nearly repeats it."""
PIECE_CHARACTERS = 24
MOST_CHARACTERS = 8192
"""Characters of a text that are compared."""
STEP_CHARACTERS = 64
"""A common beginning is known to this many characters."""
SKETCHED = 128
PERMUTATIONS = 64
LEAST_PIECES = 8
"""Pieces after the common beginning below which nothing is said."""
MOST_CANDIDATES = 32
MOST_TEXTS = 100_000
"""Texts that are remembered, of about 4 KB each; later ones are still compared with those."""

_ODD = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))
_POWERS = np.cumprod(np.full(MOST_CHARACTERS + 1, _ODD, dtype=np.uint64))
_INVERSES = np.cumprod(np.full(MOST_CHARACTERS + 1, _INVERSE, dtype=np.uint64))
Digests = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class _Sketch:
    """`smallest` `[n]`: a text's least piece digests, uint32 and ascending; `beginnings`: digests
    of what it begins with, in steps of STEP_CHARACTERS; `pieces`: how many it has; `last`: the
    last one's digest."""

    pieces: int
    last: np.uint32
    smallest: NDArray[np.uint32]
    beginnings: Digests
    label: str


class NearDuplicates:
    """The texts told so far, each with a label.

    Pieces are stretches of 24 characters, case aside. A text nearly repeats an earlier one when the
    earlier one holds at least `share` of its pieces after their common beginning. Of very many texts
    that are mostly alike, as logs with one long system prompt, only the first are remembered. With
    `copies`, a text that is an earlier one throughout is told, too.
    """

    def __init__(self, share: float = NEAR, *, copies: bool = False) -> None:
        self.share, self.copies = share, copies
        self._permutations = MinHash(num_perm=PERMUTATIONS).permutations
        self._index = MinHashLSH(threshold=0.5, num_perm=PERMUTATIONS)
        self._sketches: list[_Sketch] = []

    def repeated(self, text: str, label: str) -> str | None:
        """The label of an earlier text that this one nearly repeats, or None; remembers this one
        under that label, else under `label`."""
        pieces = _pieces(_codes(text[:MOST_CHARACTERS].casefold()))
        if len(pieces) < LEAST_PIECES:
            return None
        smallest = _smallest(pieces)
        minhash = MinHash(
            num_perm=PERMUTATIONS,
            hashfunc=int,
            permutations=self._permutations,
            scheme="affine32",
        )
        minhash.update_batch(smallest.tolist())
        beginnings = _beginnings(_codes(text))
        candidates = sorted(self._index.query(minhash))
        earlier = None
        for number in candidates[:MOST_CANDIDATES]:
            sketch = self._sketches[number]
            if self._repeats(pieces, beginnings, sketch):
                earlier = sketch.label
                break
        crowded = len(candidates) >= MOST_CANDIDATES
        if not crowded and len(self._sketches) < MOST_TEXTS:
            self._index.insert(len(self._sketches), minhash, check_duplication=False)
            self._sketches.append(
                _Sketch(len(pieces), pieces[-1], smallest, beginnings, earlier or label)
            )
        return earlier

    def _repeats(self, pieces: NDArray[np.uint32], beginnings: Digests, earlier: _Sketch) -> bool:
        """Whether the earlier text holds enough of `pieces` `[n]` after the common beginning."""
        common = min(len(beginnings), len(earlier.beginnings))
        same = beginnings[:common] == earlier.beginnings[:common]
        steps = common if bool(same.all()) else int(same.argmin())
        if len(pieces) == earlier.pieces and pieces[-1] == earlier.last and steps == common:
            return self.copies
        rest = pieces[steps * STEP_CHARACTERS :]
        # Only below the sketch's largest digest does a missing piece show that the text lacks it.
        if len(earlier.smallest) == SKETCHED:
            rest = rest[rest <= earlier.smallest[-1]]
        if len(rest) < LEAST_PIECES:
            return False
        return float(np.isin(rest, earlier.smallest).mean()) >= self.share


def clustered(texts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """For each document of `texts` (document, text), the document that its cluster is named after:
    documents are in one cluster where a text of the one repeats, wholly or nearly, a text of the
    other."""
    seen = NearDuplicates(copies=True)
    first: dict[str, str] = {}
    for document, text in texts:
        first.setdefault(document, document)
        earlier = seen.repeated(text, document)
        if earlier is not None and first[earlier] != first[document]:
            joined, kept = first[document], first[earlier]
            first = {name: kept if root == joined else root for name, root in first.items()}
    return first


def _codes(text: str) -> Digests:
    """Code points `[characters]` of what is compared, none of them 0."""
    compared = text[:MOST_CHARACTERS].encode("utf-32-le", "surrogatepass")
    points = np.frombuffer(compared, dtype=np.uint32)
    return points.astype(np.uint64) + np.uint64(1)


def _sums(codes: Digests) -> Digests:
    """Polynomial sums of all beginnings `[characters + 1]`, modulo 2⁶⁴."""
    terms = codes * _POWERS[: len(codes)]
    return np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(terms, dtype=np.uint64)))


def _pieces(codes: Digests) -> NDArray[np.uint32]:
    """A digest for each stretch of PIECE_CHARACTERS, in order."""
    count = len(codes) - PIECE_CHARACTERS + 1
    if count <= 0:
        return np.zeros(0, dtype=np.uint32)
    sums = _sums(codes)
    # The difference of two sums carries the power of where the stretch stands: it is divided out.
    stretches = np.subtract(sums[PIECE_CHARACTERS:], sums[:count], dtype=np.uint64)
    placeless = np.multiply(stretches, _INVERSES[:count], dtype=np.uint64)
    return (mixed(placeless) >> np.uint64(32)).astype(np.uint32)


def _beginnings(codes: Digests) -> Digests:
    return mixed(_sums(codes)[STEP_CHARACTERS::STEP_CHARACTERS])


def _smallest(pieces: NDArray[np.uint32]) -> NDArray[np.uint32]:
    if len(pieces) > 4 * SKETCHED:
        # Repeated pieces may take several places, so more are kept than are wanted.
        pieces = np.partition(pieces, 2 * SKETCHED)[: 2 * SKETCHED]
    return np.unique(pieces)[:SKETCHED]


def mixed(values: Digests) -> Digests:
    """Each of `values` (uint64) with all its bits spread (splitmix64's last step)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
