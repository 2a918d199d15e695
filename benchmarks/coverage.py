"""Simulated coverage of the intervals: `python -m benchmarks.coverage`.

Each scenario draws whole evaluations whose truth is known, documents with items that agree with one another,
and counts how often the 95 % interval holds that truth. The bar is 93–97 %.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from kvbridge.eval.statistics.bootstrap import METHODS, Floats, ratio_interval

LOW, HIGH = 0.93, 0.97
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
_CORRELATION = 0.2

Sizes = Floats
Draw = Callable[[np.random.Generator, Sizes, float], tuple[Floats, Floats, float]]
"""Sizes `[documents]` and a share p to numerator and denominator sums `[documents]` and the true ratio."""


def _document_share(rng: np.random.Generator, p: float, documents: int) -> Floats:
    """A share per document around p whose items correlate by `_CORRELATION` (beta-binomial)."""
    spread = (1 - _CORRELATION) / _CORRELATION
    return rng.beta(p * spread, (1 - p) * spread, documents)


def accuracy(rng: np.random.Generator, sizes: Sizes, p: float) -> tuple[Floats, Floats, float]:
    """Share of right answers."""
    right = rng.binomial(sizes.astype(int), _document_share(rng, p, len(sizes)))
    return right.astype(float), sizes, p


def paired_difference(
    rng: np.random.Generator, sizes: Sizes, p: float
) -> tuple[Floats, Floats, float]:
    """t − s where p of the items are discordant and t wins seven of ten of those."""
    discordant = rng.binomial(sizes.astype(int), _document_share(rng, p, len(sizes)))
    won = rng.binomial(discordant, 0.7)
    return (2 * won - discordant).astype(float), sizes, 0.4 * p


def retention(rng: np.random.Generator, sizes: Sizes, p: float) -> tuple[Floats, Floats, float]:
    """t/d: the receiver has 70 % right, the translation keeps p of those."""
    right = rng.binomial(sizes.astype(int), 0.7)
    kept = rng.binomial(right, _document_share(rng, p, len(sizes)))
    return kept.astype(float), right.astype(float), p


def gap_share(rng: np.random.Generator, sizes: Sizes, p: float) -> tuple[Floats, Floats, float]:
    """(g − s)/(d − s) with 5 % harm: s 45 %, d 80 %, each item of the gap recovered with probability p."""
    needed = rng.binomial(sizes.astype(int), 0.40)
    harmed = rng.binomial((sizes - needed).astype(int), 0.05 / 0.60)
    won = rng.binomial(needed, _document_share(rng, p, len(sizes)))
    gap = (needed - harmed).astype(float)
    return (won - p * harmed).astype(float), gap, p


def recovery(rng: np.random.Generator, sizes: Sizes, p: float) -> tuple[Floats, Floats, float]:
    """Recovery in nats: what a context is worth is lognormal by document, its recovered share varies."""
    documents = len(sizes)
    worth = sizes * rng.lognormal(0.0, 0.5, documents)
    noise = rng.normal(0.0, 0.15, documents) * np.sqrt(sizes)
    return worth * _document_share(rng, p, documents) + noise, worth, p


STATISTICS: dict[str, Draw] = {
    "accuracy": accuracy,
    "paired difference": paired_difference,
    "retention": retention,
    "share of the gap": gap_share,
    "recovery": recovery,
}


@dataclass(frozen=True)
class Scenario:
    statistic: str
    documents: int
    sizes: str
    p: float
    per_document: int = 8

    def draw_sizes(self, rng: np.random.Generator) -> Sizes:
        if self.sizes == "equal":
            return np.full(self.documents, float(self.per_document))
        return 2.0 + np.minimum(
            rng.geometric(1 / (self.per_document - 2), self.documents), 4 * self.per_document
        )


def scenarios(documents: int = 50, shares: tuple[float, ...] = SHARES) -> Iterator[Scenario]:
    for statistic in STATISTICS:
        for sizes in ("equal", "unequal"):
            yield from (Scenario(statistic, documents, sizes, p) for p in shares)


def simulate(
    scenario: Scenario, repetitions: int, *, methods: tuple[str, ...], seed: int = 0
) -> dict[str, float]:
    """Share of `repetitions` whose interval holds the truth, per method; an unknown one counts as a miss."""
    rng = np.random.default_rng(
        [seed, *scenario.statistic.encode(), int(scenario.p * 1000), len(scenario.sizes)]
    )
    names = [f"{index:05d}" for index in range(scenario.documents)]
    held = dict.fromkeys(methods, 0)
    for _ in range(repetitions):
        numerator, denominator, truth = STATISTICS[scenario.statistic](
            rng, scenario.draw_sizes(rng), scenario.p
        )
        for method in methods:
            held[method] += ratio_interval(numerator, denominator, names, method=method).contains(
                truth
            )
    return {method: count / repetitions for method, count in held.items()}


def main() -> None:
    """Print the table; exits 1 if the method in use leaves 93–97 % anywhere."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--documents", type=int, default=50)
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=["studentised"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    arguments = parser.parse_args()
    started, methods = time.perf_counter(), tuple(arguments.methods)
    found = [
        (case, simulate(case, arguments.repetitions, methods=methods, seed=arguments.seed))
        for case in scenarios(arguments.documents)
    ]
    used = [shares["studentised"] for _, shares in found if "studentised" in shares]
    outside = sum(not LOW <= share <= HIGH for share in used)
    if arguments.json:
        print(json.dumps([vars(case) | shares for case, shares in found]))
    else:
        table = RichTable(title=f"Coverage of 95 % intervals, {arguments.repetitions} repetitions")
        for name in ("statistic", "documents", "sizes", "p", *methods):
            table.add_column(name, justify="left" if name in ("statistic", "sizes") else "right")
        for case, shares in found:
            row = (case.statistic, str(case.documents), case.sizes, f"{case.p:g}")
            table.add_row(*row, *(f"{shares[method]:.1%}" for method in methods))
        Console().print(table)
        print(
            f"{outside} of {len(used)} outside {LOW:.0%}–{HIGH:.0%}; {time.perf_counter() - started:.0f} s"
        )
    raise SystemExit(1 if outside else 0)


if __name__ == "__main__":
    main()
