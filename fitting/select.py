"""Which sender layers a receiver layer reads: pure functions over a score, in one dict."""

from __future__ import annotations

from collections.abc import Callable

SupportScore = Callable[[tuple[int, ...]], float]
"""Mean validation R² of a map that reads these sender layers; higher is better."""


def relative_order(layers: int, depth: float) -> list[int]:
    """Indices 0..layers−1 by distance of relative depth (0 first layer, 1 last) to `depth`; ties:
    the earlier first."""
    # Relative, since a model of twice the layers does the same work over twice as many of them.
    span = max(1, layers - 1)
    return sorted(range(layers), key=lambda i: (abs(i / span - depth), i))


def top_k(score: SupportScore, candidates: list[int], k: int) -> tuple[int, ...]:
    """The k candidates with the highest score alone: single-layer validation R² (arXiv
    2608.03893)."""
    return tuple(sorted(sorted(candidates, key=lambda i: (-score((i,)), i))[:k]))


def nearest(score: SupportScore, candidates: list[int], k: int) -> tuple[int, ...]:
    """The k nearest by relative depth; candidates come in that order, nothing is scored."""
    return tuple(sorted(candidates[:k]))


def greedy(score: SupportScore, candidates: list[int], k: int) -> tuple[int, ...]:
    """Forward selection: adds the layer that raises the joint score most, stops early when none
    does."""
    chosen: tuple[int, ...] = ()
    best = float("-inf")
    while len(chosen) < min(k, len(candidates)):
        joint = {i: score(tuple(sorted((*chosen, i)))) for i in candidates if i not in chosen}
        winner = min(joint, key=lambda i: (-joint[i], i))
        # On validation a layer that only copies others lowers the score: fewer layers are cheaper.
        if chosen and joint[winner] <= best:
            break
        chosen, best = tuple(sorted((*chosen, winner))), joint[winner]
    return chosen


Selector = Callable[[SupportScore, list[int], int], tuple[int, ...]]
SELECTORS: dict[str, Selector] = {"top-k": top_k, "nearest": nearest, "greedy": greedy}
