"""What a signal is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbridge.gates.signals.costs import GatePart
from kvbridge.gates.signals.reading import Reading

Read = Callable[[Reading], tuple[float, ...]]


@dataclass(frozen=True)
class Signal:
    """One thing that a gate reads from a request.

    `read` gives one number per column, higher for worse where that can be said; it raises
    Inapplicable where this request, plan or pair has no such number. `parts`: the work it needs; it
    says `reading.spend(part)` for each that Reading does not do for it. `integrity`: its columns
    tell a cache of other content from the right one, and get limits of their own. `default`: read
    unless a caller asks for others; what runs all of the sender or many rows of a head is not, for
    its cost.
    """

    columns: tuple[str, ...]
    read: Read
    parts: tuple[GatePart, ...]
    about: str
    integrity: bool = False
    default: bool = True
