"""Labels: what counts as damage. A new one is one line here.

A label is a function of an Outcome and a limit τ; where it has no τ of its own, τ is ignored. It
gives None where it says nothing about a request. NaN is damage: comparisons are written so that
they must hold for a request to count as undamaged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbridge.gates.labels.outcomes import Outcome


@dataclass(frozen=True)
class Label:
    """`damaged(outcome, tau)` decides, `about` says it in words. `default`: τ where none is given,
    None for a label without one. `needs_answer`: it speaks only of prompts that an answer to be
    found follows.
    """

    damaged: Callable[[Outcome, float], bool | None]
    default: float | None
    about: str
    needs_answer: bool = False

    def limit(self, tau: float | None) -> float:
        """`tau` where it is given, else the label's own; 0 for a label without one."""
        if tau is not None:
            return tau
        return 0.0 if self.default is None else self.default


def _flipped(outcome: Outcome, tau: float) -> bool | None:
    del tau
    return outcome.flip


def _diverged(outcome: Outcome, tau: float) -> bool | None:
    return not outcome.diverges >= tau


def _lost(outcome: Outcome, tau: float) -> bool | None:
    del tau
    if outcome.native_right is None:
        return None
    return outcome.native_right and not outcome.translated_right


def _gap(outcome: Outcome, tau: float) -> bool | None:
    return None if outcome.gap is None else not outcome.gap <= tau


def _kl(outcome: Outcome, tau: float) -> bool | None:
    return not outcome.kl <= tau


LABELS: dict[str, Label] = {
    "next_token": Label(_flipped, None, "the next greedy token differs"),
    "continuation": Label(_diverged, 4, "one of the next τ greedy tokens differs (τ ≤ 4)"),
    "lost_answer": Label(
        _lost, None, "right when dense and wrong when translated", needs_answer=True
    ),
    "loss_gap": Label(
        _gap, 0.1, "nats per token of what follows exceed the receiver's own by more than τ"
    ),
    "kl": Label(_kl, 0.1, "KL of the next token's distribution exceeds τ nats"),
}
