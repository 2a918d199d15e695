"""The Hub client's download bars as numbers for whoever asked, who may draw a bar of their own."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm


def reporting(report: Callable[[int, int], None]) -> type[tqdm[Any]]:
    """A class for the client's `tqdm_class` that draws nothing: `report` gets bytes done and in all.

    The client has a bar each for bytes from the network and bytes on the disk; whichever is further
    counts, so that what is reported never goes back.
    """
    most = 0

    class Reported(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "file": io.StringIO(), "disable": False})

        def display(self, *_: Any, **__: Any) -> None:
            nonlocal most
            if self.unit == "B" and self.total and self.n > most:
                most = int(self.n)
                report(most, int(self.total))

    return Reported
