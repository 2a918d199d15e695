"""Which split each beginning of a text belongs to: the first that saw it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvbridge.duplicates import mixed
from kvbridge.fitting.data import SPLITS

MOST_DIGESTS = 2**24
"""Beginnings that are kept, of eight bytes each (128 MiB); past it every other one is let go."""

Digests = NDArray[np.uint64]


class Beginnings:
    """Digests of the texts up to each of their tokens' ends, by the split that saw them first.

    Eight bytes a beginning. Past MOST_DIGESTS only beginnings whose digest ends in one zero bit
    more are kept; a row between two of those counts as seen where either was.
    """

    def __init__(self, most: int = MOST_DIGESTS) -> None:
        self.most = most
        self._mask = np.uint64(0)
        self._seen: dict[str, list[Digests]] = {split: [] for split in SPLITS}

    def own(self, split: str, text: str, ends: Tensor) -> Tensor:
        """Whether the text up to each of `ends` `[tokens]` (never going back) is this split's own
        `[tokens]`; what nobody had seen becomes its own."""
        digests, token_of = np.unique(ends.numpy(), return_inverse=True)
        digests = _digests(text, digests)
        kept = (digests & self._mask) == 0
        foreign = np.zeros(len(digests), dtype=bool)
        for other, levels in self._seen.items():
            if other != split:
                foreign[kept] |= _holds(levels, digests[kept])
        new = digests[kept & ~foreign]
        new = new[~_holds(self._seen[split], new)]
        _insert(self._seen[split], new)
        self._bound()
        if not bool(kept.all()):
            foreign = _spread(foreign, kept)
        return torch.from_numpy(~foreign[token_of])

    def _bound(self) -> None:
        """Lets every other digest go while there are too many."""
        while sum(len(level) for levels in self._seen.values() for level in levels) > self.most:
            self._mask = self._mask * np.uint64(2) + np.uint64(1)
            for levels in self._seen.values():
                levels[:] = [level[(level & self._mask) == 0] for level in levels]


def _digests(text: str, ends: NDArray[np.int64]) -> Digests:
    """A digest of the text up to each of `ends`: the sum of one number for each character and its
    place, modulo 2⁶⁴."""
    points = np.frombuffer(text[: int(ends[-1])].encode("utf-32-le"), dtype=np.uint32)
    places = np.arange(1, len(points) + 1, dtype=np.uint64) << np.uint64(32)
    sums = np.cumsum(mixed(places + points.astype(np.uint64)), dtype=np.uint64)
    return np.concatenate((np.zeros(1, dtype=np.uint64), sums))[ends]


def _holds(levels: list[Digests], digests: Digests) -> NDArray[np.bool_]:
    """Which of `digests` stand in any of the sorted arrays."""
    held = np.zeros(len(digests), dtype=bool)
    for level in levels:
        if len(level):
            at = np.searchsorted(level, digests).clip(max=len(level) - 1)
            held |= level[at] == digests
    return held


def _insert(levels: list[Digests], digests: Digests) -> None:
    """Adds a sorted array, merged with those not much longer, so that there are few (modified)."""
    levels.append(np.sort(digests))
    while len(levels) > 1 and len(levels[-2]) <= 2 * len(levels[-1]):
        last, before = levels.pop(), levels.pop()
        levels.append(np.sort(np.concatenate((before, last)), kind="stable"))


def _spread(foreign: NDArray[np.bool_], kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """`foreign` where it is known (`kept`); elsewhere that of the known neighbours, seen where
    either is."""
    at = np.flatnonzero(kept)
    if not len(at):
        return foreign
    places = np.arange(len(foreign))
    before = np.searchsorted(at, places, side="right") - 1
    after = np.searchsorted(at, places, side="left")
    known_before = (before >= 0) & foreign[at[before.clip(min=0)]]
    known_after = (after < len(at)) & foreign[at[after.clip(max=len(at) - 1)]]
    return known_before | known_after
