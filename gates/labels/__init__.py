"""Labels: what counts as damage. A new one is a function of an Outcome and a limit τ, and one line here.

None: the label says nothing about this request. τ is ignored where a label has none. NaN is damage: comparisons are
written so that they must hold for a request to count as undamaged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbridge.gates.labels.outcomes import Outcome


@dataclass(frozen=True)
class Label:
    """`damaged(outcome, tau)`; `default` is τ where none is given, None for labels without one."""

    damaged: Callable[[Outcome, float], bool | None]
    default: float | None
    about: str


def _gap(outcome: Outcome, tau: float) -> bool | None:
    return None if outcome.gap is None else not outcome.gap <= tau


def _lost(outcome: Outcome, tau: float) -> bool | None:
    del tau
    return (
        None
        if outcome.native_right is None
        else outcome.native_right and not outcome.translated_right
    )


LABELS: dict[str, Label] = {
    "next_token": Label(lambda o, _: o.flip, None, "the next greedy token differs"),
    "continuation": Label(
        lambda o, tau: not o.diverges >= tau, 4, "one of the next τ greedy tokens differs (τ ≤ 4)"
    ),
    "lost_answer": Label(_lost, None, "right when dense and wrong when translated"),
    "loss_gap": Label(
        _gap, 0.1, "nats per token of what follows exceed the receiver's own by more than τ"
    ),
    "kl": Label(
        lambda o, tau: not o.kl <= tau, 0.1, "KL of the next token's distribution exceeds τ nats"
    ),
}
