"""What a condition is: a way past a prompt, its part in the comparison, and its names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvbridge.eval.conditions.prompt import Prompt
from kvbridge.eval.conditions.setup import Setup
from kvbridge.eval.tasks.start import Start

Role = Literal["subject", "denominator", "control", "floor", "reference"]
"""`subject`: is judged. `denominator`: what a subject is measured against, the receiver's own
prefill and the sender. `control`: must be beaten at the same tail, or the sender's cache adds
nothing. `floor`: the receiver without context. `reference`: shown beside a subject at the same tail
where it was run."""
ROLES: tuple[Role, ...] = ("subject", "denominator", "control", "floor", "reference")
TAILS = (1, 32)
"""How many of the last tokens a run without a choice has recomputed."""
LAST = 100
_TAIL = re.compile(r"[1-9][0-9]*")


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One way past a prompt.

    `run` takes a prompt and how many of the last tokens the receiver recomputes; conditions that
    have no such number do not look at it. Of those that have one (`by_tail`), `tails` are run
    without a choice; at tail 1 they bear `name`, at another `name`, `suffix` and the tail.

    `label` is the name in words (`label_at` at another tail than 1), `phrase` the one in "beats …".
    `order` is the place in tables. `beside` are routes that a subject is compared with before all
    controls, without which its own figures say little. `screened_tail` is the tail at which a
    control stands in a screening's table. `own_tokens`: tokens are the receiver's, so that nats per
    token compare. `available` says whether a setup allows it (None: every one does).
    """

    name: str
    label: str
    role: Role
    run: Callable[[Prompt, int], Start]
    order: int = LAST
    by_tail: bool = False
    tails: tuple[int, ...] = (1,)
    suffix: str = "_tail"
    label_at: str = "{label}, tail {tail}"
    phrase: str = ""
    beside: tuple[str, ...] = ()
    screened_tail: int = 1
    own_tokens: bool = True
    available: Callable[[Setup], bool] | None = None

    def named(self, tail: int) -> str:
        """What it is called with `tail` recomputed tokens."""
        return self.name if tail == 1 else f"{self.name}{self.suffix}{tail}"

    def labelled(self, tail: int) -> str:
        """The same in words."""
        return self.label if tail == 1 else self.label_at.format(label=self.label, tail=tail)

    def tail_of(self, name: str) -> int | None:
        """The tail that `name` says of this route; None where it is no name of it."""
        if not self.by_tail:
            return None
        if name == self.name:
            return 1
        tail = name.removeprefix(self.name + self.suffix)
        if tail == name or not _TAIL.fullmatch(tail) or self.named(int(tail)) != name:
            return None
        return int(tail)
