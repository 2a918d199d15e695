"""Prompt length, in log tokens. Costs nothing."""

import math

from kvbridge.gates.reading import Reading
from kvbridge.gates.signals.base import Signal


def _read(reading: Reading) -> tuple[float, ...]:
    return (math.log(len(reading.evidence.ids)),)


LENGTH = Signal(("length",), _read, (), "log of the prompt's tokens")
