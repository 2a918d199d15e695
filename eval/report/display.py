"""How figures read: numbers with their intervals, columns of tables, who the pair is.

Everything here takes the summary as it stands in `summary.json`, so a report can be made again from
the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvbridge.eval.conditions import names

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column: its key in a condition of the summary, its heading, and how a value of it is
    written."""

    key: str
    heading: str
    unit: str
    style: str


COLUMNS = (
    Column("recovery", "Recovery", "of the context's worth", "percent"),
    Column("loss", "Loss", "nats / character", "loss"),
    Column("kl", "KL", "nats, from native", "small"),
    Column("agreement", "Agreement", "same next token", "percent"),
    Column("accuracy", "Accuracy", "right answers", "percent"),
    Column("prefill_share", "Cost", "of a prefill's FLOPs", "percent"),
    Column("ttft_ms", "First token", "ms, median", "ms"),
)


PREDICTOR_WORDS = {
    "end_match": "token ends that match",
    "loss_gap": "sender's loss over the receiver's, nats per character",
    "cka": "CKA of the most similar layers",
    "cca": "CCA of the same layers",
    "r2_tokens": "R² from the receiver's tokens alone",
    "r2_gain": "R² that a sender layer adds",
}


def predictor(name: str) -> str:
    """What a predictor is, in words."""
    return PREDICTOR_WORDS.get(name, name.replace("_", " "))


def role(condition: str) -> Literal["subject", "ceiling", "control"]:
    """How a condition is drawn: what is judged, the two denominators, all others."""
    drawn = names.role(condition)
    if drawn == "denominator":
        return "ceiling"
    return "subject" if drawn == "subject" else "control"


def number(value: float | None, style: str, signed: bool = False) -> str:
    """A value in words: an en dash where it does not apply, a true minus sign, two to four
    significant digits."""
    if value is None:
        return "–"
    sign = "+" if signed else ""
    if style == "percent":
        # What rounds to 100 % or −100 % stands without its decimal.
        places = 1 if abs(value) < 0.9995 or value > 1.0005 else 0
        text = f"{100 * value:{sign}.{places}f}%"
    elif style == "points":
        text = f"{100 * value:{sign}.1f}"
    elif style == "loss":
        text = f"{value:{sign}.3f}"
    elif style == "ms":
        text = f"{value:{sign}.0f}" if abs(value) >= 100 else f"{value:{sign}.1f}"
    elif style == "axis":
        text = f"{value:.2g}"
    elif style == "p":
        return "< 0.001" if value < 0.001 else f"{value:.3f}"
    elif style == "count":
        return f"{value:,.0f}"
    else:
        text = f"{value:{sign}#.3g}" if value else "0"
    return text.replace("-", "\N{MINUS SIGN}")


def interval(ci: list[float | None] | None, style: str, signed: bool = False) -> str:
    """`low to high` without the unit, or nothing where there is no interval or it is a point."""
    if not ci or ci[0] is None or ci[1] is None:
        return ""
    low, high = (number(bound, style, signed).rstrip("%") for bound in ci)
    return "" if low == high else f"{low} to {high}"


def columns(summary: Summary) -> list[Column]:
    """The columns that any condition has a value for."""
    shown = []
    for column in COLUMNS:
        if any(one.get(column.key) is not None for one in summary["conditions"].values()):
            shown.append(column)
    return shown


def pair_name(summary: Summary) -> tuple[str, str]:
    """Sender and receiver as they are to be shown; the row digest stands in where the run did not
    name them."""
    sender, receiver = (_model_name(summary["pair"].get(side)) for side in ("sender", "receiver"))
    return sender or "sender", receiver or "receiver"


def _model_name(side: Any) -> str:
    if isinstance(side, Mapping):
        return str(side.get("id", "?"))
    return str(side or "")


def measured(summary: Summary) -> str:
    """How many items were measured, and how many were not."""
    left_out = summary.get("n_left_out", 0)
    return f"{summary['n']} items" + (f" ({left_out} left out)" if left_out else "")


def figure(
    shown: Mapping[str, Any] | None, style: str, signed: bool = False, unit: str = ""
) -> str:
    """`value [low to high]`, or why there is none."""
    if not shown or shown["value"] is None:
        return f"not shown: {shown['refused']}" if shown and shown.get("refused") else "–"
    ci = interval(shown["ci"], style, signed)
    return f"{number(shown['value'], style, signed)}{unit}" + (f" [{ci}]" if ci else "")


def plain(text: str) -> str:
    """Text that Markdown and HTML leave as it is."""
    escaped = "".join(f"\\{c}" if c in "\\`*_{}[]|#" else c for c in text)
    return escaped.replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
