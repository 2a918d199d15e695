"""What a study comes to in a few lines, null results first."""

from __future__ import annotations

from typing import Any

from benchmarks.gates.page import share

USEFUL = 0.2
"""Least coverage that is worth having."""


def levels_of(label: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(α, δ, recalibrations) of one label, ascending in α, where there were any."""
    levels = []
    for level, runs in (label.get("recalibrations") or {}).items():
        if isinstance(runs, dict) and runs["request"].get("n"):
            alpha, delta = level.split("/")
            levels.append((alpha, delta, runs))
    return levels


def headline(body: dict[str, Any]) -> str:
    """Labels for which nothing useful holds, then the best setting of the others, then what it
    saves."""
    nothing, good = [], []
    for name, label in body["labels"].items():
        damaged = share(label["damaged"], 0)
        useful = [level for level in levels_of(label) if _is_useful(level[2])]
        if useful:
            alpha, delta, runs = useful[0]
            good.append(_setting(name, damaged, float(alpha), float(delta), runs["request"]))
        else:
            nothing.append(f"{name} ({damaged} damaged)")
    shares = body["shares"]
    lines = [
        f"**Null results**: no α ≤ 20 % reaches {100 * USEFUL:g} % coverage for "
        + ("; ".join(nothing) or "none of the labels tried")
        + ".",
        "",
        *(good or ["Nothing holds with useful coverage on this pair."]),
        "",
        f"At these prompt lengths (median {body['tokens'][2]} tokens) the handoff costs "
        f"{share(shares['handoff'], 0)} of a prefill, the default signals "
        f"{share(shares['gate'], 0)} and all signals {share(shares['gate_of_all'], 0)}, in counted "
        "FLOPs.",
    ]
    return "\n".join(lines) + "\n"


def _is_useful(runs: dict[str, Any]) -> bool:
    return bool(runs["request"]["coverage"] >= USEFUL)


def _setting(name: str, damaged: str, alpha: float, delta: float, drawn: dict[str, Any]) -> str:
    return (
        f"- {name}: α = {100 * alpha:g} %, δ = {100 * delta:g} %: {share(drawn['coverage'], 0)} "
        f"accepted where {damaged} are damaged; broken in {drawn['violations']} of {drawn['n']} "
        "recalibrations."
    )
