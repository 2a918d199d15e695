"""Which ordered pairs of a fleet are worth a translator: the table over many pairs.

Each pair brings the summary of its evaluation and what was measured before fitting. Testing many
pairs at once needs a correction (Holm); saying that a predictor works needs many pairs, so
correlations are shown from ten on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich import box
from rich.table import Table
from scipy import stats

from kvbridge.errors import EvalError
from kvbridge.eval.conditions import CONDITIONS
from kvbridge.eval.conditions.names import controls, named
from kvbridge.eval.report import display
from kvbridge.eval.statistics.bootstrap import RESOLVED, NotShown
from kvbridge.eval.statistics.outcomes import holm
from kvbridge.eval.statistics.table import number
from kvbridge.eval.statistics.verdict import CASCADE, GATE, PREFILL, TRANSLATE
from kvbridge.format import SCREENING_SCHEMA

PAIRS_FOR_CORRELATION = 10
EXTRAPOLATED = (
    f"p below {RESOLVED:.3f}, finer than the resamples count: read from their tail, "
    "on the safe side"
)


def screened_controls() -> list[str]:
    """Controls whose recovery stands beside the translation's, each at the tail that says most."""
    return [named(route, CONDITIONS[route].screened_tail) for route in controls()]


@dataclass(frozen=True)
class Screened:
    """One ordered pair: its `predictors` (name → value, from before fitting) and, once fitted, its
    outcome."""

    sender: str
    receiver: str
    predictors: Mapping[str, float] = field(default_factory=dict)
    summary: Mapping[str, Any] | None = None
    asset_bytes: int | None = None
    break_even_tokens: float | None = None
    refused: str = ""


def contrast_p(summary: Mapping[str, Any], against: str) -> tuple[float | None, float | None]:
    """Difference and two-sided p of translated against `against` on the summary's deciding task."""
    for task in (summary["loss_task"], summary["accuracy_task"]):
        for c in summary["contrasts"]:
            if (c["condition"], c["against"], c["task"]) == ("translated", against, task):
                return c["difference"], c["p"]
    return None, None


def pair_rows(pairs: Sequence[Screened], *, level: float = 0.05) -> list[dict[str, Any]]:
    """One dict per pair, best verdict and recovery first, with `p_holm` over all pairs that were
    evaluated.

    `p_extrapolated`: the pair's p is smaller than what resampling resolves and was read from the
    fitted tail. `survives` says whether the pair's difference to the sender (in either direction)
    still stands at `level` after Holm; a `translate` verdict that does not is shown as uncertain,
    not changed. Raises EvalError for a pair given twice.
    """
    names = [(pair.sender, pair.receiver) for pair in pairs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise EvalError(f"the pair {' → '.join(twice)} is given twice")
    tests = [contrast_p(pair.summary, "sender") if pair.summary else (None, None) for pair in pairs]
    known = [index for index, (_, p) in enumerate(tests) if p is not None]
    adjusted = (
        dict(zip(known, holm([float(tests[i][1] or 0.0) for i in known]), strict=True))
        if known
        else {}
    )
    rows = []
    for index, pair in enumerate(pairs):
        conditions = (pair.summary or {"conditions": {}})["conditions"]
        translated = conditions.get("translated", {})
        p_holm = float(adjusted[index]) if index in adjusted else None
        rows.append(
            {
                "sender": pair.sender,
                "receiver": pair.receiver,
                "verdict": pair.summary["verdict"] if pair.summary else None,
                "reason": pair.summary["headline"]
                if pair.summary
                else pair.refused or "not fitted",
                "recovery": translated.get("recovery"),
                "recovery_ci": translated.get("recovery_ci"),
                "controls": {
                    name: conditions.get(name, {}).get("recovery") for name in screened_controls()
                },
                "accuracy": {
                    name: conditions.get(name, {}).get("accuracy")
                    for name in ("sender", "translated", "native")
                },
                "over_sender": tests[index][0],
                "p_holm": number(p_holm),
                "survives": p_holm is not None and p_holm < level,
                "p_extrapolated": index in adjusted and float(tests[index][1] or 0.0) < RESOLVED,
                "prefill_share": translated.get("prefill_share"),
                "break_even_tokens": number(pair.break_even_tokens),
                "asset_bytes": pair.asset_bytes,
                "predictors": {
                    name: number(value) for name, value in sorted(pair.predictors.items())
                },
            }
        )
    order = {TRANSLATE: 0, GATE: 1, CASCADE: 2, PREFILL: 3, None: 4}
    return sorted(
        rows,
        key=lambda r: (order[r["verdict"]], -(r["recovery"] or 0.0), r["sender"], r["receiver"]),
    )


def fleet_bytes(
    asset_bytes: Mapping[tuple[str, str], int], models: Sequence[str]
) -> dict[str, Any]:
    """What translators for every ordered pair would take: P models are P(P − 1) pairs.

    Pairs without a measured asset count with the mean of those measured; `total_bytes` is None
    without any.
    """
    names = sorted(set(models))
    if len(names) != len(models):
        raise EvalError(f"a model is named twice among {', '.join(models)}")
    wanted = [(sender, receiver) for sender in names for receiver in names if sender != receiver]
    measured = [asset_bytes[pair] for pair in wanted if pair in asset_bytes]
    mean = sum(measured) / len(measured) if measured else None
    total = None if mean is None else round(sum(measured) + mean * (len(wanted) - len(measured)))
    p = len(names)
    words = f"{p} models are P(P − 1) = {p} × {p - 1} = {len(wanted)} ordered pairs"
    if mean is not None:
        words += f"; at {size(mean)} each on average they take {size(total or 0)}"
        if len(measured) < len(wanted):
            words += f", {len(wanted) - len(measured)} of them estimated"
    return {
        "models": p,
        "pairs": len(wanted),
        "measured": len(measured),
        "mean_bytes": number(mean),
        "total_bytes": total,
        "words": words + ".",
    }


def size(count: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if count < 999.5 else f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def correlations(
    predictors: Mapping[str, ArrayLike], outcome: ArrayLike
) -> dict[str, dict[str, Any] | NotShown] | NotShown:
    """Spearman's ρ and Pearson's r of each predictor with `outcome` `[pairs]`, Holm over the
    predictors.

    Pairs where a predictor or the outcome is NaN are left out of it. NotShown below ten pairs, for
    the whole or for the predictor: an r of 0.5 from six pairs has an interval from −0.5 to 0.9.
    """
    outcomes = np.asarray(outcome, dtype=np.float64)
    if np.isfinite(outcomes).sum() < PAIRS_FOR_CORRELATION:
        return NotShown(
            f"{np.isfinite(outcomes).sum()} pairs, correlations need {PAIRS_FOR_CORRELATION}"
        )
    related: dict[str, dict[str, Any] | NotShown] = {}
    p_values: dict[str, float] = {}
    for name, column in predictors.items():
        values = np.asarray(column, dtype=np.float64)
        if values.shape != outcomes.shape:
            raise EvalError(f"predictor {name} has {values.size} values for {outcomes.size} pairs")
        both = np.isfinite(values) & np.isfinite(outcomes)
        x, y = values[both], outcomes[both]
        if len(x) < PAIRS_FOR_CORRELATION:
            related[name] = NotShown(f"{len(x)} pairs, correlations need {PAIRS_FOR_CORRELATION}")
        elif np.ptp(x) == 0 or np.ptp(y) == 0:
            related[name] = NotShown("all pairs have the same value")
        else:
            pearson, spearman = stats.pearsonr(x, y), stats.spearmanr(x, y)
            ci = pearson.confidence_interval(0.95)
            related[name] = {
                "pairs": len(x),
                "spearman": number(spearman.statistic),
                "pearson": number(pearson.statistic),
                "pearson_ci": [number(ci.low), number(ci.high)],
            }
            p_values[name] = float(spearman.pvalue)
    for name, p in zip(p_values, holm(list(p_values.values())) if p_values else [], strict=True):
        related[name] |= {"p_holm": number(float(p))}  # type: ignore[operator]
    return related


def screening_summary(pairs: Sequence[Screened]) -> dict[str, Any]:
    """The content of `screening.json`: the pairs, the fleet's bytes, correlations where there are
    enough pairs."""
    models = sorted({name for pair in pairs for name in (pair.sender, pair.receiver)})
    sizes = {(p.sender, p.receiver): p.asset_bytes for p in pairs if p.asset_bytes is not None}
    rows = pair_rows(pairs)
    names = sorted({name for row in rows for name in row["predictors"]})
    columns = {name: [_or_nan(row["predictors"].get(name)) for row in rows] for name in names}
    outcome = [_or_nan(row["recovery"]) for row in rows]
    related = correlations(columns, outcome)
    return {
        "schema": SCREENING_SCHEMA,
        "pairs": rows,
        "fleet": fleet_bytes(sizes, models),
        "correlation_with_recovery": {"refused": related.because}
        if isinstance(related, NotShown)
        else {
            name: {"refused": r.because} if isinstance(r, NotShown) else r
            for name, r in related.items()
        },
    }


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def screening_table(summary: Mapping[str, Any]) -> Table:
    """One row per pair for the terminal, the fleet's bytes in the caption."""
    caption = summary["fleet"]["words"]
    if any(row["p_extrapolated"] for row in summary["pairs"]):
        caption += f"\n* {EXTRAPOLATED}"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption=caption)
    table.caption_justify = "left"
    for name in ("sender → receiver", "verdict"):
        table.add_column(name)
    for name in ("recovery", "over sender", "p (Holm)", "break-even", "asset"):
        table.add_column(name, justify="right")
    for row in summary["pairs"]:
        tokens, asset = row["break_even_tokens"], row["asset_bytes"]
        table.add_row(
            f"{row['sender']} → {row['receiver']}",
            row["verdict"] or row["reason"],
            display.figure({"value": row["recovery"], "ci": row["recovery_ci"]}, "percent"),
            display.number(row["over_sender"], "loss", signed=True),
            display.number(row["p_holm"], "p") + ("*" if row["p_extrapolated"] else ""),
            "–" if tokens is None else f"{tokens:,.0f} tokens",
            "–" if asset is None else size(asset),
        )
    return table
