"""Simulated coverage of the intervals: `python -m benchmarks.coverage`.

Each scenario draws whole evaluations whose truth is known, documents with items that agree with one
another, and counts how often the 95 % interval holds that truth. The bar is 93–97 %.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer

from kvbridge.cli.ending import run_to_the_end
from kvbridge.cli.options import Json
from kvbridge.cli.output import table
from kvbridge.clock import Stopwatch
from kvbridge.errors import UsageError, unknown_names
from kvbridge.eval.statistics.bootstrap import METHODS, FloatArray, ratio_interval

LOW, HIGH = 0.93, 0.97
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
_CORRELATION = 0.2

Sizes = FloatArray
Draw = Callable[[np.random.Generator, Sizes, float], tuple[FloatArray, FloatArray, float]]
"""Sizes `[documents]` and a share p to numerator and denominator sums `[documents]` and the true
ratio."""


def _document_share(rng: np.random.Generator, p: float, documents: int) -> FloatArray:
    """A share per document around p whose items correlate by `_CORRELATION` (beta-binomial)."""
    spread = (1 - _CORRELATION) / _CORRELATION
    return rng.beta(p * spread, (1 - p) * spread, documents)


def accuracy(
    rng: np.random.Generator, sizes: Sizes, p: float
) -> tuple[FloatArray, FloatArray, float]:
    """Share of right answers."""
    right = rng.binomial(sizes.astype(int), _document_share(rng, p, len(sizes)))
    return right.astype(float), sizes, p


def paired_difference(
    rng: np.random.Generator, sizes: Sizes, p: float
) -> tuple[FloatArray, FloatArray, float]:
    """t − s where p of the items are discordant and t wins seven of ten of those."""
    discordant = rng.binomial(sizes.astype(int), _document_share(rng, p, len(sizes)))
    won = rng.binomial(discordant, 0.7)
    return (2 * won - discordant).astype(float), sizes, 0.4 * p


def retention(
    rng: np.random.Generator, sizes: Sizes, p: float
) -> tuple[FloatArray, FloatArray, float]:
    """t/d: the receiver has 70 % right, the translation keeps p of those."""
    right = rng.binomial(sizes.astype(int), 0.7)
    kept = rng.binomial(right, _document_share(rng, p, len(sizes)))
    return kept.astype(float), right.astype(float), p


def gap_share(
    rng: np.random.Generator, sizes: Sizes, p: float
) -> tuple[FloatArray, FloatArray, float]:
    """(g − s)/(d − s) with 5 % harm: s 45 %, d 80 %, each item of the gap recovered with
    probability p."""
    needed = rng.binomial(sizes.astype(int), 0.40)
    harmed = rng.binomial((sizes - needed).astype(int), 0.05 / 0.60)
    won = rng.binomial(needed, _document_share(rng, p, len(sizes)))
    gap = (needed - harmed).astype(float)
    return (won - p * harmed).astype(float), gap, p


def recovery(
    rng: np.random.Generator, sizes: Sizes, p: float
) -> tuple[FloatArray, FloatArray, float]:
    """Recovery in nats: what a context is worth is lognormal by document, its recovered share
    varies."""
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
    """Share of `repetitions` whose interval holds the truth, per method; an unknown one counts as a
    miss."""
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


Cases = list[tuple[Scenario, dict[str, float]]]
"""Every scenario with the share of its repetitions whose interval held the truth, per method."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def measure(
    repetitions: Annotated[int, typer.Option(help="Simulated evaluations per scenario.")] = 2000,
    documents: Annotated[int, typer.Option(help="Documents of one evaluation.")] = 50,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="Method of intervals to try; may be repeated. Without it, studentised, the one in "
            "use.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of every draw.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure how often a 95 % interval of the evaluation holds the truth.

    Whole evaluations are simulated whose truth is known. The program ends with exit code 1 if the
    method in use holds it in fewer than 93 % or more than 97 % of them anywhere.
    """
    chosen = tuple(methods or ["studentised"])
    if unknown := [name for name in chosen if name not in METHODS]:
        raise UsageError(unknown_names("methods", unknown, METHODS))
    watch = Stopwatch()
    cases: Cases = []
    for scenario in scenarios(documents):
        cases.append((scenario, simulate(scenario, repetitions, methods=chosen, seed=seed)))
    used = [shares["studentised"] for _, shares in cases if "studentised" in shares]
    outside = sum(not LOW <= share <= HIGH for share in used)
    if as_json:
        print(json.dumps([vars(scenario) | shares for scenario, shares in cases]))
    else:
        show(cases, f"Coverage of 95 % intervals, {repetitions} repetitions", chosen)
        print(f"{outside} of {len(used)} outside {LOW:.0%}–{HIGH:.0%}; {watch.seconds():.0f} s")
    raise typer.Exit(1 if outside else 0)


def show(cases: Cases, title: str, methods: tuple[str, ...]) -> None:
    """One row per scenario."""
    rows = []
    for scenario, shares in cases:
        row = [scenario.statistic, str(scenario.documents), scenario.sizes, f"{scenario.p:g}"]
        rows.append([*row, *(f"{shares[method]:.1%}" for method in methods)])
    table(title, ["statistic", "documents", "sizes", "p", *methods], rows)


def main() -> None:
    """The program."""
    run_to_the_end(app, "python -m benchmarks.coverage")


if __name__ == "__main__":
    main()
