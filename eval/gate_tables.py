"""study.json as Markdown tables.

python -m kvbridge.eval.gate_tables runs/gate/study.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """One Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def share(value: float | None, digits: int = 1) -> str:
    """A share in per cent."""
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def number(value: float | None) -> str:
    """Two digits."""
    return "–" if value is None else f"{value:.2f}"


def guarantees(body: dict[str, Any]) -> str:
    """Recalibrations per label and level."""
    rows = []
    for label, found in body["labels"].items():
        for level, runs in (found.get("recalibrations") or {}).items():
            if not isinstance(runs, dict) or not runs["request"].get("n"):
                continue
            r, d = runs["request"], runs["document"]
            alpha, delta = level.split("/")
            rows.append([
                label, share(found["damaged"]), alpha, delta, share(r["calibrated"], 0), share(r["coverage"]),
                f"{r['violations']} of {r['n']} ({share(r['violation_ci'][0])} to {share(r['violation_ci'][1])})",
                f"{d['violations']} of {d['n']} ({share(d['violation_ci'][0])} to {share(d['violation_ci'][1])})",
                share(runs.get("net_saving")),
            ])  # fmt: skip
    return table(
        ["damage", "base rate", "α", "δ", "calibrated", "mean coverage", "broken, drawn by request", "by document", "net saving"],
        rows,
    )  # fmt: skip


def separations(body: dict[str, Any]) -> str:
    """The score, AURC and baselines per label."""
    rows = []
    for label, found in body["labels"].items():
        s = found.get("separation")
        if not s or s.get("score") is None:
            rows.append([label, str(found["n"]), share(found["damaged"]), *["–"] * 8])
            continue
        a, d = s["aurc"], s["detection"]
        rows.append([
            label, str(s["n"]), share(s["damaged"]), number(s["score"]), number(s["score_without_sender"]),
            *(f"{a[k]:.3f}" for k in ("score", "always (random order)", "length", "sender entropy", "oracle")),
            " / ".join(share(d[k], 0) for k in ("0.01", "0.05", "0.1")),
        ])  # fmt: skip
    return table(
        ["damage", "n", "base rate", "AUROC", "without the sender model", "AURC", "always", "length", "sender entropy", "oracle", "found at 1 / 5 / 10 % false alarms"],
        rows,
    )  # fmt: skip


def columns(body: dict[str, Any], labels: Sequence[str]) -> str:
    """AUROC of every column for some labels and for wrong documents."""
    names = list(body["wrong_columns"])
    cell = lambda label, c: number(body["labels"][label]["separation"]["columns"].get(c))  # noqa: E731
    rows = [[c, number(body["wrong_columns"][c]), *(cell(x, c) for x in labels)] for c in names]
    return table(["column", "another document", *labels], rows)


def risks(body: dict[str, Any]) -> str:
    """Risk at coverage with its interval."""
    rows = []
    for label, found in body["labels"].items():
        curve = (found.get("separation") or {}).get("risk_at_coverage")
        if curve:
            rows.append([label, *(f"{share(k)} ({share(low)}–{share(high)})" for k, low, high in curve.values())])
    return table(["damage", *(f"at {100 * float(c):.0f} %" for c in ("0.1", "0.2", "0.3", "0.5", "0.7", "1"))], rows)


def wrongs(body: dict[str, Any]) -> str:
    """Wrong caches that pass the limits."""
    cases = list(next(iter(body["wrong"].values()))["cases"])
    rows = []
    for name, found in body["wrong"].items():
        cells = [
            f"{found['cases'][c]['passed']} of {found['cases'][c]['n']}" if c in found["cases"] else "–" for c in cases
        ]
        every = found["every_wrong_document"]
        rows.append([name, share(found["extra_refusals"], 2), f"{every['passed']} of {every['n']} (≤ {share(every['bound_95'], 2)})", *cells])  # fmt: skip
    return table(["limits on", "right caches refused", "other documents passed (95 % bound)", *cases], rows)


def main() -> None:
    """Prints every table of the study given."""
    body = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    facts = {k: body[k] for k in ("requests", "documents", "tokens", "contract_refused", "shares", "carried", "ladder")}
    print(json.dumps(facts, indent=1))
    wanted = [x for x in body["labels"] if body["labels"][x].get("separation")]
    for part in (guarantees(body), separations(body), risks(body), columns(body, wanted), wrongs(body)):
        print(part)


if __name__ == "__main__":
    main()
