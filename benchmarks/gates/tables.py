"""study.json as Markdown: every table, under the question that it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.gates.headline import levels_of
from benchmarks.gates.page import number, share, table


def guarantees(body: dict[str, Any]) -> str:
    """Recalibrations per label and level."""
    rows = []
    for name, label in body["labels"].items():
        for alpha, delta, runs in levels_of(label):
            by_request = runs["request"]
            if by_request["calibrated"] < 0.05 and alpha != "0.2":
                continue
            rows.append(
                [
                    name,
                    share(label["damaged"]),
                    alpha,
                    delta,
                    share(by_request["calibrated"], 0),
                    share(by_request["coverage"]),
                    _broken(by_request),
                    _broken(runs["document"]),
                    share(runs.get("net_saving")),
                ]
            )
    columns = [
        "damage",
        "base rate",
        "α",
        "δ",
        "calibrated",
        "mean coverage",
        "broken, drawn by request",
        "by document",
        "net saving",
    ]
    return table(columns, rows)


def _broken(drawn: dict[str, Any]) -> str:
    """How often the promise was broken, of how many recalibrations, with the interval."""
    low, high = drawn["violation_ci"]
    return f"{drawn['violations']} of {drawn['n']} ({share(low)} to {share(high)})"


SCORES = {
    "AUROC": "score",
    "without the sender model": "score_without_sender",
    "with all signals": "score_of_all",
}
ORDERS = {
    "AURC": "score",
    "always": "always (random order)",
    "length": "length",
    "sender entropy": "sender entropy",
    "oracle": "oracle",
}
"""Columns of the table → what the study calls them."""


def separations(body: dict[str, Any]) -> str:
    """The default signals' score, AURC and baselines per label, and AUROC of two other sets."""
    detection = "found at 1 / 5 / 10 % false alarms"
    columns = ["damage", "n", "base rate", *SCORES, *ORDERS, detection]
    rows = []
    for name, label in body["labels"].items():
        told = label.get("separation")
        if not told or told.get("score") is None:
            blank = ["–"] * (len(columns) - 3)
            rows.append([name, str(label["n"]), share(label["damaged"]), *blank])
            continue
        rows.append(
            [
                name,
                str(told["n"]),
                share(told["damaged"]),
                *(number(told[key]) for key in SCORES.values()),
                *(f"{told['aurc'][key]:.3f}" for key in ORDERS.values()),
                " / ".join(share(told["detection"][rate], 0) for rate in ("0.01", "0.05", "0.1")),
            ]
        )
    return table(columns, rows)


def by_column(body: dict[str, Any]) -> str:
    """AUROC of every column for some labels and for wrong documents."""
    names = _labels_shown(body)
    told = [body["labels"][name]["separation"]["columns"] for name in names]
    rows = []
    for column, wrong in body["wrong_columns"].items():
        rows.append([column, number(wrong), *(number(columns.get(column)) for columns in told)])
    return table(["column", "another document", *names], rows)


def _labels_shown(body: dict[str, Any]) -> list[str]:
    """Up to three labels, of the most frequent kind of text where there are several."""
    told = [name for name, label in body["labels"].items() if label.get("separation")]
    of_one_kind = [name for name in told if "," in name] or told
    usual = ("next_token", "kl > 0.1", "loss_gap")
    return [name for name in of_one_kind if name.startswith(usual)][:3]


def risks(body: dict[str, Any]) -> str:
    """Risk at coverage with its interval."""
    rows = []
    for name, label in body["labels"].items():
        curve = (label.get("separation") or {}).get("risk_at_coverage")
        if curve:
            cells = [f"{share(k)} ({share(low)}–{share(high)})" for k, low, high in curve.values()]
            rows.append([name, *cells])
    coverages = ("0.1", "0.2", "0.3", "0.5", "0.7", "1")
    return table(["damage", *(f"at {100 * float(c):.0f} %" for c in coverages)], rows)


def wrongs(body: dict[str, Any]) -> str:
    """Wrong caches that pass the limits."""
    cases = list(next(iter(body["wrong"].values()))["cases"])
    rows = []
    for name, limits in body["wrong"].items():
        every = limits["every_wrong_document"]
        cells = []
        for case in cases:
            passed = limits["cases"].get(case)
            cells.append("–" if passed is None else f"{passed['passed']} of {passed['n']}")
        rows.append(
            [
                name,
                share(limits["extra_refusals"], 2),
                f"{every['passed']} of {every['n']} (≤ {share(every['bound_95'], 2)})",
                *cells,
            ]
        )
    columns = ["limits on", "right caches refused", "other documents passed (95 % bound)", *cases]
    return table(columns, rows)


def carried(body: dict[str, Any]) -> str:
    """A calibration used where it was not made."""
    rows = []
    for name, ways in body["carried"].items():
        rows += [[name, way, *_carried(result)] for way, result in ways.items()]
    return table(["damage", "from → to", "base risk there", "accepted", "damaged (95 %)"], rows)


def _carried(result: dict[str, Any]) -> tuple[str, str, str]:
    base = result.get("base_risk")
    if "why" in result or not result.get("held"):
        why = "too few damaged at home" if base is None else "nothing holds at home"
        return share(base), why, "–"
    accepted = f"{result['accepted']} of {result['away']}"
    if result["risk_ci"] is None:
        return share(base), accepted, "–"
    low, high = result["risk_ci"]
    return share(base), accepted, f"{result['damaged']} ({share(low)}–{share(high)})"


def ladders(body: dict[str, Any]) -> str:
    """One rung against two."""
    names = []
    for risk in ("0.05", "0.1", "0.2"):
        names += [f"{rungs} at risk {risk}" for rungs in ("one rung", "two rungs")]
    rows = []
    for label, result in body["ladder"].items():
        cells = [share(result.get(name), 0) for name in names]
        affordable = share(result["second_rung_affordable"], 0)
        rows.append([label, str(result["n"]), *cells, affordable])
    return table(["damage", "n", *names, "second rung affordable"], rows)


@dataclass(frozen=True)
class StudyTable:
    """One table of the page, and the question that it answers."""

    title: str
    question: str
    text: Callable[[dict[str, Any]], str]


TABLES = (
    StudyTable(
        "The guarantee, realised",
        "Does a calibration keep its promise, how much does it accept, and what does it save?",
        guarantees,
    ),
    StudyTable(
        "What predicts damage",
        "How well does the score tell damaged requests from others, beside simpler orders?",
        separations,
    ),
    StudyTable(
        "Risk at coverage (95 %)",
        "How many of the accepted are damaged when the best 10 %, 20 %, … are accepted?",
        risks,
    ),
    StudyTable(
        "AUROC by column; below 0.5: high values mean less damage",
        "Which single number tells the cache of another document, and which tells damage?",
        by_column,
    ),
    StudyTable(
        "Wrong caches",
        "How many wrong caches of each kind get past the limits that each set of signals gives?",
        wrongs,
    ),
    StudyTable(
        "Carried to another domain, calibrated at α = 10 %, δ = 5 %",
        "Does a calibration keep its promise on requests unlike those it was made of?",
        carried,
    ),
    StudyTable(
        "The ladder: share accepted at a risk, without a guarantee",
        "Does trying a second, longer repair let more requests through at the same risk?",
        ladders,
    ),
)


def tables(body: dict[str, Any]) -> str:
    """Every table under its heading."""
    low, tenth, middle, ninth, high = body["tokens"]
    lines = [
        f"{body['requests']} requests from {body['documents']} documents, {low} to {high} tokens "
        f"(median {middle}, 80 % within {tenth} to {ninth}); the contract refused "
        f"{body['contract_refused']}.\n"
    ]
    for part in TABLES:
        lines.append(f"#### {part.title}\n\n{part.question}\n\n{part.text(body)}")
    return "\n".join(lines)
