"""What was decided, kept: one JSON line per decision, and counters for Prometheus where its client is installed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvbridge.errors import UsageError

Log = Callable[[Mapping[str, Any]], None]


class JsonLines:
    """Appends one line per record to `path`, each in one write, so that several processes may share the file. Raises
    OSError where it cannot: the gate then refuses, for a decision that is not kept must not be acted on."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __call__(self, record: Mapping[str, Any]) -> None:
        line = (json.dumps(record, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n").encode()
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            if os.write(handle, line) != len(line):
                raise OSError(f"{self.path}: the line was cut short")
        finally:
            os.close(handle)


class Counters:
    """Counts decisions by tenant, verdict and reason, and the FLOPs that gates spent; `registry` is prometheus_client's.

    Raises UsageError where prometheus-client is not installed (`pip install kvbridge[metrics]`).
    """

    def __init__(self, registry: Any = None) -> None:
        try:
            from prometheus_client import REGISTRY, Counter
        except ImportError as error:
            raise UsageError("counters need prometheus-client: pip install 'kvbridge[metrics]'") from error
        where = REGISTRY if registry is None else registry
        self._decisions = Counter(
            "kvbridge_gate_decisions", "Decisions", ("tenant", "verdict", "reason"), registry=where
        )
        self._flops = Counter("kvbridge_gate_flops", "FLOPs spent on signals", registry=where)

    def __call__(self, record: Mapping[str, Any]) -> None:
        self._decisions.labels(record["tenant"], record["verdict"], record["reason"]).inc()
        self._flops.inc(record["gate_flops"])


def both(*logs: Log) -> Log:
    """One log that writes to several, in order."""

    def write(record: Mapping[str, Any]) -> None:
        for log in logs:
            log(record)

    return write
