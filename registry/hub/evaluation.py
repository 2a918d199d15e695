"""The table of an evaluation for a repository's card: every condition beside its controls, of this
very translator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from kvbridge import codec
from kvbridge.asset.manifest import Manifest
from kvbridge.errors import Refused
from kvbridge.format import SUMMARY_SCHEMA
from kvbridge.registry.store.naming import clean

SHOWN_CONTROLS = ("native", "sender", "no_context", "wrong_document", "token_only", "tail_only")
_METRICS = {
    "recovery": ("recovery", 100, "%"),
    "kl": ("KL to native", 1, ""),
    "agreement": ("next-token agreement", 100, "%"),
    "accuracy": ("accuracy", 100, "%"),
    "prefill_share": ("FLOPs of a prefill", 100, "%"),
}
MAX_CONDITIONS = 64
ConditionName = Annotated[str, Meta(pattern=r"\A[a-z][a-z0-9_]{0,39}\Z")]
Shown = Annotated[float, Meta(ge=-1e6, le=1e6)]


@dataclass(frozen=True)
class RunSummary:
    """Of a run's `summary.json`, what a card shows."""

    pair: dict[str, Any]
    headline: str
    verdict: str
    n: int
    documents: int


def evaluation(path: Path, digest: str, manifest: Manifest) -> str:
    """Markdown of a run's `summary.json`.

    Raises Refused where the run is of another translator or of other models, or lacks a control;
    CorruptFile or UnknownSchema where it is no such summary.
    """
    name = f"{path} (expected the summary.json of `kvbridge eval run`)"
    body = codec.check_schema(codec.read_json(path), SUMMARY_SCHEMA, name)
    summary = codec.convert(body, RunSummary, name, partial=True)
    _check_pair(summary.pair, digest, manifest, path)
    kind = Annotated[dict[ConditionName, Any], Meta(max_length=MAX_CONDITIONS)]
    conditions: dict[str, Any] = codec.convert(
        body.get("conditions"), kind, f"{path}: conditions by name"
    )
    if missing := [name for name in (*SHOWN_CONTROLS, "translated") if name not in conditions]:
        raise Refused(
            f"{path}: {', '.join(missing)} was not measured, and no score is shown without its "
            "controls; run `kvbridge eval run` with its default conditions"
        )
    rows = [
        [f"`{condition}`", *_row(cells, condition, path)] for condition, cells in conditions.items()
    ]
    head = ["condition", "rows", *(title for title, _, _ in _METRICS.values())]
    table = "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
    return f"""## Evaluation

> {clean(summary.headline)[:1000].replace("<", "&lt;")}

{summary.n} items from {summary.documents} documents; 95 % intervals clustered by document.
`native` is the receiver's own prefill, `sender` not switching; `token_only` reads no sender,
`wrong_document` another document's.

{table}
"""


def _check_pair(pair: dict[str, Any], digest: str, manifest: Manifest, path: Path) -> None:
    """Raises Refused unless the run was of this translator and of its models."""
    wanted = {
        "translator_digest": digest,
        "sender_digest": manifest.sender.digest,
        "receiver_digest": manifest.receiver.digest,
    }
    for key, expected in wanted.items():
        if pair.get(key) != expected:
            raise Refused(
                f"{path}: its {key} is {pair.get(key)!r:.80}, expected {expected}; "
                "evaluate the asset that is pushed"
            )


def _row(given: object, condition: str, path: Path) -> list[str]:
    where = f"{path}: figures of {condition}"
    cells = codec.convert(given, dict[str, Any], where)
    count = codec.convert(cells.get("n"), int, f"{where}, n")
    return [str(count), *(_cell(cells, metric, where) for metric in _METRICS)]


def _cell(cells: dict[str, Any], metric: str, where: str) -> str:
    """`0.35 [0.30, 0.40]` in the metric's unit, – where it does not apply."""
    problem = f"{where}: {metric} holds something that is not a number"
    given = cells.get(metric), cells.get(f"{metric}_ci")
    interval = () if given[1] is None else codec.convert(given[1], tuple[Shown, ...], problem)
    if given[0] is None:
        return "–"
    value = codec.convert(given[0], Shown, problem)
    _, scale, unit = _METRICS[metric]
    places = 0 if unit else 2
    shown = f"{value * scale:.{places}f}" + (f" {unit}" if unit else "")
    if len(interval) != 2:
        return shown
    low, high = (f"{bound * scale:.{places}f}" for bound in interval)
    return f"{shown} [{low}, {high}]"
