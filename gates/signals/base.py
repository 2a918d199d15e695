"""What a signal is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbridge.gates.signals.reading import Reading

Read = Callable[[Reading], tuple[float, ...]]


@dataclass(frozen=True)
class Signal:
    """`read` gives one number per column, higher for worse where that can be said; it raises Inapplicable where this
    request, plan or pair has no such number. `parts`: keys of costs.PARTS it needs, shared with other signals and paid
    once. `integrity`: its columns tell a cache of other content from the right one, and get limits of their own. `default`:
    read unless a caller asks for others; what runs all of the sender or many rows of a head is not, for its cost.
    """

    columns: tuple[str, ...]
    read: Read
    parts: tuple[str, ...]
    about: str
    integrity: bool = False
    default: bool = True
