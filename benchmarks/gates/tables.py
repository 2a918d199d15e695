"""study.json as Markdown: what holds and what does not, then every table; printed, or put into a page.

    python -m benchmarks.gates.tables runs/gate/study.json
    python -m benchmarks.gates.tables runs/gate/study.json --into docs/gates.md --section demo

A section NAME of a page is what stands between `<!-- NAME: headline -->` or `<!-- NAME: tables -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbridge.codec import parse_json
from kvbridge.errors import KVBridgeError, UsageError
from kvbridge.files import write_file

USEFUL = 0.2
QUESTIONS = {
    "The guarantee, realised": "Does a calibration keep its promise, how much does it accept, and what does it save?",
    "What predicts damage": "How well does the score tell damaged requests from others, beside simpler orders?",
    "Risk at coverage (95 %)": "How many of the accepted are damaged when the best 10 %, 20 %, … are accepted?",
    "AUROC by column; below 0.5: high values mean less damage": "Which single number tells the cache of another document, and which tells damage?",
    "Wrong caches": "How many wrong caches of each kind get past the limits that each set of signals gives?",
    "Carried to another domain, calibrated at α = 10 %, δ = 5 %": "Does a calibration keep its promise on requests unlike those it was made of?",
    "The ladder: share accepted at a risk, without a guarantee": "Does trying a second, longer repair let more requests through at the same risk?",
}
"""Title of a table → the question it answers."""


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
        for alpha, delta, runs in levels_of(found):
            r, d = runs["request"], runs["document"]
            if r["calibrated"] < 0.05 and alpha != "0.2":
                continue
            rows.append(
                [
                    label,
                    share(found["damaged"]),
                    alpha,
                    delta,
                    share(r["calibrated"], 0),
                    share(r["coverage"]),
                    f"{r['violations']} of {r['n']} ({share(r['violation_ci'][0])} to {share(r['violation_ci'][1])})",
                    f"{d['violations']} of {d['n']} ({share(d['violation_ci'][0])} to {share(d['violation_ci'][1])})",
                    share(runs.get("net_saving")),
                ]
            )
    return table(
        [
            "damage",
            "base rate",
            "α",
            "δ",
            "calibrated",
            "mean coverage",
            "broken, drawn by request",
            "by document",
            "net saving",
        ],
        rows,
    )


def separations(body: dict[str, Any]) -> str:
    """The default signals' score, AURC and baselines per label, and AUROC of two other sets."""
    rows = []
    for label, found in body["labels"].items():
        s = found.get("separation")
        if not s or s.get("score") is None:
            rows.append([label, str(found["n"]), share(found["damaged"]), *["–"] * 9])
            continue
        a, d = s["aurc"], s["detection"]
        rows.append(
            [
                label,
                str(s["n"]),
                share(s["damaged"]),
                *(number(s[k]) for k in ("score", "score_without_sender", "score_of_all")),
                *(
                    f"{a[k]:.3f}"
                    for k in (
                        "score",
                        "always (random order)",
                        "length",
                        "sender entropy",
                        "oracle",
                    )
                ),
                " / ".join(share(d[k], 0) for k in ("0.01", "0.05", "0.1")),
            ]
        )
    return table(
        [
            "damage",
            "n",
            "base rate",
            "AUROC",
            "without the sender model",
            "with all signals",
            "AURC",
            "always",
            "length",
            "sender entropy",
            "oracle",
            "found at 1 / 5 / 10 % false alarms",
        ],
        rows,
    )


def columns(body: dict[str, Any], labels: Sequence[str]) -> str:
    """AUROC of every column for some labels and for wrong documents."""
    names = list(body["wrong_columns"])
    by_label = [body["labels"][label]["separation"]["columns"] for label in labels]
    rows = [
        [c, number(body["wrong_columns"][c]), *(number(found.get(c)) for found in by_label)]
        for c in names
    ]
    return table(["column", "another document", *labels], rows)


def risks(body: dict[str, Any]) -> str:
    """Risk at coverage with its interval."""
    rows = []
    for label, found in body["labels"].items():
        curve = (found.get("separation") or {}).get("risk_at_coverage")
        if curve:
            rows.append(
                [
                    label,
                    *(
                        f"{share(k)} ({share(low)}–{share(high)})"
                        for k, low, high in curve.values()
                    ),
                ]
            )
    return table(
        [
            "damage",
            *(f"at {100 * float(c):.0f} %" for c in ("0.1", "0.2", "0.3", "0.5", "0.7", "1")),
        ],
        rows,
    )


def wrongs(body: dict[str, Any]) -> str:
    """Wrong caches that pass the limits."""
    cases = list(next(iter(body["wrong"].values()))["cases"])
    rows = []
    for name, found in body["wrong"].items():
        cells = [
            f"{found['cases'][c]['passed']} of {found['cases'][c]['n']}"
            if c in found["cases"]
            else "–"
            for c in cases
        ]
        every = found["every_wrong_document"]
        rows.append(
            [
                name,
                share(found["extra_refusals"], 2),
                f"{every['passed']} of {every['n']} (≤ {share(every['bound_95'], 2)})",
                *cells,
            ]
        )
    return table(
        ["limits on", "right caches refused", "other documents passed (95 % bound)", *cases], rows
    )


def levels_of(found: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(α, δ, recalibrations) of one label, ascending in α, where there were any."""
    runs = (found.get("recalibrations") or {}).items()
    return [
        (*level.split("/"), r) for level, r in runs if isinstance(r, dict) and r["request"].get("n")
    ]


def carried(body: dict[str, Any]) -> str:
    """A calibration used where it was not made."""
    rows = []
    for label, found in body["carried"].items():
        for way, one in found.items():
            if "why" in one or not one.get("held"):
                base = one.get("base_risk")
                rows.append(
                    [
                        label,
                        way,
                        share(base),
                        "nothing holds at home" if base is not None else "too few damaged at home",
                        "–",
                    ]
                )
                continue
            n, k, ci = one["accepted"], one["damaged"], one["risk_ci"]
            risk = "–" if ci is None else f"{k} ({share(ci[0])}–{share(ci[1])})"
            rows.append([label, way, share(one["base_risk"]), f"{n} of {one['away']}", risk])
    return table(["damage", "from → to", "base risk there", "accepted", "damaged (95 %)"], rows)


def ladders(body: dict[str, Any]) -> str:
    """One rung against two."""
    names = [
        f"{rungs} at risk {risk}"
        for risk in ("0.05", "0.1", "0.2")
        for rungs in ("one rung", "two rungs")
    ]
    rows = [
        [
            label,
            str(found["n"]),
            *(share(found.get(n), 0) for n in names),
            share(found["second_rung_affordable"], 0),
        ]
        for label, found in body["ladder"].items()
    ]
    return table(["damage", "n", *names, "second rung affordable"], rows)


def headline(body: dict[str, Any]) -> str:
    """Null results first: labels for which nothing useful holds, then the best setting of the others, then what it saves."""
    nothing, good = [], []
    for label, found in body["labels"].items():
        useful = [(a, d, r) for a, d, r in levels_of(found) if r["request"]["coverage"] >= USEFUL]
        if not useful:
            nothing.append(f"{label} ({share(found['damaged'], 0)} damaged)")
            continue
        alpha, delta, runs = useful[0]
        r = runs["request"]
        good.append(
            f"- {label}: α = {100 * float(alpha):g} %, δ = {100 * float(delta):g} %: {share(r['coverage'], 0)} accepted where "
            f"{share(found['damaged'], 0)} are damaged; broken in {r['violations']} of {r['n']} recalibrations."
        )
    shares = body["shares"]
    lines = [
        f"**Null results**: no α ≤ 20 % reaches {100 * USEFUL:g} % coverage for "
        + ("; ".join(nothing) if nothing else "none of the labels tried")
        + ".",
        "",
        *(good or ["Nothing holds with useful coverage on this pair."]),
        "",
        f"At these prompt lengths (median {body['tokens'][2]} tokens) the handoff costs {share(shares['handoff'], 0)} of a "
        f"prefill, the default signals {share(shares['gate'], 0)} and all signals {share(shares['gate_of_all'], 0)}, in counted FLOPs.",
    ]
    return "\n".join(lines) + "\n"


def tables(body: dict[str, Any]) -> str:
    """Every table under its heading."""
    wanted = [x for x in body["labels"] if body["labels"][x].get("separation")]
    home = [x for x in wanted if "," in x] or wanted
    shown = [x for x in home if x.startswith(("next_token", "kl > 0.1", "loss_gap"))][:3]
    low, tenth, middle, ninth, high = body["tokens"]
    lines = [
        f"{body['requests']} requests from {body['documents']} documents, {low} to {high} tokens (median {middle}, 80 % "
        f"within {tenth} to {ninth}); the contract refused {body['contract_refused']}.\n"
    ]
    made = {
        "The guarantee, realised": guarantees(body),
        "What predicts damage": separations(body),
        "Risk at coverage (95 %)": risks(body),
        "AUROC by column; below 0.5: high values mean less damage": columns(body, shown),
        "Wrong caches": wrongs(body),
        "Carried to another domain, calibrated at α = 10 %, δ = 5 %": carried(body),
        "The ladder: share accepted at a risk, without a guarantee": ladders(body),
    }
    for title, text in made.items():
        lines.append(f"#### {title}\n\n{QUESTIONS[title]}\n\n{text}")
    return "\n".join(lines)


def into(page: str, section: str, parts: dict[str, str]) -> str:
    """The page with the blocks of a section replaced. Raises UsageError where the page has no such block."""
    for name, text in parts.items():
        block = re.compile(
            rf"(<!-- {re.escape(section)}: {name} -->\n).*?(<!-- end -->)", re.DOTALL
        )
        found = block.search(page)
        if found is None:
            raise UsageError(
                f"expected a block <!-- {section}: {name} --> … <!-- end --> in the page, found none"
            )
        page = page[: found.end(1)] + text + page[found.start(2) :]
    return page


def main() -> None:
    """Prints every table of the study given, or puts it into a page; exits 1 with one line on a refusal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument(
        "--into", type=Path, default=None, help="a Markdown page with the section's blocks"
    )
    parser.add_argument("--section", default=None, help="their name")
    arguments = parser.parse_args()
    try:
        body: Any = parse_json(arguments.study.read_bytes(), str(arguments.study))
        parts = {"headline": headline(body), "tables": tables(body)}
        if arguments.into is None:
            print(parts["headline"] + "\n" + parts["tables"])
            return
        if arguments.section is None:
            raise UsageError("expected --section with --into")
        page = into(arguments.into.read_text("utf-8"), arguments.section, parts)
        write_file(arguments.into, page.encode())
    except (KVBridgeError, OSError) as error:
        print(f"kvbridge: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
