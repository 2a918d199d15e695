"""Signals: what a gate reads from one request. A new one is one file and one line here."""

from collections.abc import Iterable

from kvbridge.gates.signals.alignment import ALIGNMENT
from kvbridge.gates.signals.attention_error import ATTENTION_ERROR
from kvbridge.gates.signals.base import Signal
from kvbridge.gates.signals.costs import GatePart
from kvbridge.gates.signals.disagreement import DISAGREEMENT
from kvbridge.gates.signals.first_layers import FIRST_LAYERS
from kvbridge.gates.signals.length import LENGTH
from kvbridge.gates.signals.leverage import LEVERAGE
from kvbridge.gates.signals.next_token import NEXT_TOKEN, SENDER_NEXT
from kvbridge.gates.signals.sender_early import SENDER_EARLY
from kvbridge.gates.signals.sender_first import SENDER_FIRST
from kvbridge.gates.signals.sender_tail import SENDER_TAIL
from kvbridge.gates.signals.tail_loss import TAIL_LOSS
from kvbridge.gates.signals.tail_residual import TAIL_RESIDUAL

SIGNALS: dict[str, Signal] = {
    "alignment": ALIGNMENT,
    "length": LENGTH,
    "sender_first": SENDER_FIRST,
    "sender_early": SENDER_EARLY,
    "sender_tail": SENDER_TAIL,
    "leverage": LEVERAGE,
    "tail_residual": TAIL_RESIDUAL,
    "first_layers": FIRST_LAYERS,
    "disagreement": DISAGREEMENT,
    "attention_error": ATTENTION_ERROR,
    "tail_loss": TAIL_LOSS,
    "next_token": NEXT_TOKEN,
    "sender_next": SENDER_NEXT,
}

DEFAULT_SIGNALS: tuple[str, ...] = tuple(name for name, signal in SIGNALS.items() if signal.default)


def parts_of(names: Iterable[str]) -> dict[str, GatePart]:
    """Parts of the work that these signals need, by name, each once however many share it."""
    return {part.name: part for name in names for part in SIGNALS[name].parts}


def columns_of(names: Iterable[str]) -> list[str]:
    """Columns that these signals give, in their order."""
    return [column for name in names for column in SIGNALS[name].columns]


__all__ = ["DEFAULT_SIGNALS", "SIGNALS", "GatePart", "Signal", "columns_of", "parts_of"]
