"""Which sender layers a receiver layer reads: pure functions over a score, in one dict."""

from __future__ import annotations

from collections.abc import Callable

Score = Callable[[tuple[int, ...]], float]


def relative_order(layers: int, depth: float) -> list[int]:
    """Indices 0..layers−1 by distance of relative depth (0 first layer, 1 last) to `depth`; ties:
    the earlier first."""
    span = max(1, layers - 1)
    return sorted(range(layers), key=lambda i: (abs(i / span - depth), i))


def top_k(score: Score, candidates: list[int], k: int) -> tuple[int, ...]:
    """The k candidates with the highest score alone: single-layer validation R² (arXiv
    2608.03893)."""
    return tuple(sorted(sorted(candidates, key=lambda i: (-score((i,)), i))[:k]))


def nearest(score: Score, candidates: list[int], k: int) -> tuple[int, ...]:
    """The k nearest by relative depth; candidates come in that order, nothing is scored."""
    return tuple(sorted(candidates[:k]))


def greedy(score: Score, candidates: list[int], k: int) -> tuple[int, ...]:
    """Forward selection: adds the layer that raises the joint score most, stops early when none
    does."""
    chosen: tuple[int, ...] = ()
    best = float("-inf")
    while len(chosen) < min(k, len(candidates)):
        gains = {i: score(tuple(sorted((*chosen, i)))) for i in candidates if i not in chosen}
        winner = min(gains, key=lambda i: (-gains[i], i))
        if chosen and gains[winner] <= best:
            break
        chosen, best = tuple(sorted((*chosen, winner))), gains[winner]
    return chosen


Selector = Callable[[Score, list[int], int], tuple[int, ...]]
SELECTORS: dict[str, Selector] = {"top-k": top_k, "nearest": nearest, "greedy": greedy}
