"""What was decided, kept: one JSON line per decision, and counters for Prometheus where its client
is installed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.errors import UsageError
from kvbridge.handoff.decision import Decision, discard
from kvbridge.handoff.plan import RepairPlan

Log = Callable[[Mapping[str, Any]], None]


def record_of(
    final: Decision,
    decided: Decision,
    snapshot: KVSnapshot,
    tokens: int,
    plan: RepairPlan,
    *,
    signals: Mapping[str, float] | None,
    gate_flops: int,
    **of_gate: Any,
) -> dict[str, Any]:
    """One line of the log: `final` is acted on, `decided` is what it was before shadow mode.
    `tokens`: of the receiver's prompt. `signals` None: the request never came to the gate.
    `of_gate`: what the gate says of itself."""
    values = (
        None
        if signals is None
        else {c: v if math.isfinite(v) else None for c, v in signals.items()}
    )
    return {
        **final.to_json(),
        "decided": decided.verdict,
        "tokens": tokens,
        "plan": [plan.sinks, plan.tail, plan.layers],
        "text": snapshot.text_digest,
        "signals": values,
        "gate_flops": gate_flops,
        **of_gate,
    }


def kept(log: Log, record: Mapping[str, Any], final: Decision) -> Decision:
    """`final` once its record is written; a refusal where the log raises OSError. Whatever else it
    raises is a bug."""
    try:
        log(record)
    except OSError as error:
        return replace(
            discard(
                "fault",
                f"the decision ({final.verdict}, {final.reason}) could not be logged: {error}",
            ),
            predicted_flops=final.predicted_flops,
            predicted_ms=final.predicted_ms,
        )
    return final


class JsonLines:
    """Appends one line per record to `path`, each in one write, so that several processes may share
    the file. Raises OSError where it cannot: the gate then refuses, for a decision that is not kept
    must not be acted on."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __call__(self, record: Mapping[str, Any]) -> None:
        line = (
            json.dumps(record, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n"
        ).encode()
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            if os.write(handle, line) != len(line):
                raise OSError(f"{self.path}: the line was cut short")
        finally:
            os.close(handle)


class Counters:
    """Counts decisions by tenant, verdict and reason, and the FLOPs that gates spent; `registry` is
    prometheus_client's.

    Raises UsageError where prometheus-client is not installed (`pip install kvbridge[metrics]`).
    """

    def __init__(self, registry: Any = None) -> None:
        try:
            from prometheus_client import REGISTRY, Counter
        except ImportError as error:
            raise UsageError(
                "counters need prometheus-client: pip install 'kvbridge[metrics]'"
            ) from error
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
