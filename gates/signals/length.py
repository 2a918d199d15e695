"""Prompt length, in log tokens. Costs nothing."""

import math

from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.reading import Reading


def _read(reading: Reading) -> tuple[float, ...]:
    return (math.log(len(reading.evidence.ids)),)


LENGTH = Signal(("length",), _read, (), "log of the prompt's tokens")
