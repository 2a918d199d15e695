"""Decisions at run time: a calibration, the gate and the ladder that decide by it, and the log of
what they decided."""

from kvbridge.gates.decide.audit import Counters, JsonLines
from kvbridge.gates.decide.calibration import load_calibration, save_calibration
from kvbridge.gates.decide.gate import CalibratedGate
from kvbridge.gates.decide.ladder import Ladder
from kvbridge.gates.decide.policy import Policy, file_switch

__all__ = [
    "CalibratedGate",
    "Counters",
    "JsonLines",
    "Ladder",
    "Policy",
    "file_switch",
    "load_calibration",
    "save_calibration",
]
