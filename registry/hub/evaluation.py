"""The table of an evaluation for a repository's card: every condition beside its controls, of this very translator."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvbridge.asset.manifest import Manifest
from kvbridge.codec import read_json
from kvbridge.errors import CorruptFile, Refused, UnknownSchema
from kvbridge.format import SUMMARY_SCHEMA
from kvbridge.registry.store.naming import clean

CONTROLS = ("native", "sender", "no_context", "wrong_document", "token_only", "tail_only")
_METRICS = {
    "recovery": ("recovery", 100, "%"),
    "kl": ("KL to native", 1, ""),
    "agreement": ("next-token agreement", 100, "%"),
    "accuracy": ("accuracy", 100, "%"),
    "prefill_share": ("FLOPs of a prefill", 100, "%"),
}
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_MOST = 64


def evaluation(path: Path, digest: str, manifest: Manifest) -> str:
    """Markdown of a run's `summary.json`.

    Raises Refused where the run is of another translator or of other models, or lacks a control; CorruptFile or
    UnknownSchema where it is no such summary.
    """
    body: Any = read_json(path)
    if not isinstance(body, dict) or not isinstance(body.get("pair"), dict):
        raise CorruptFile(f"{path}: expected the summary.json of `kvbridge eval run`")
    if body.get("schema") != SUMMARY_SCHEMA:
        raise UnknownSchema(
            f"{path}: expected schema {SUMMARY_SCHEMA}, found {body.get('schema')!r:.40}"
        )
    wanted = {
        "translator_digest": digest,
        "sender_digest": manifest.sender.digest,
        "receiver_digest": manifest.receiver.digest,
    }
    for key, expected in wanted.items():
        if body["pair"].get(key) != expected:
            raise Refused(
                f"{path}: its {key} is {body['pair'].get(key)!r:.80}, expected {expected}; evaluate the asset that is pushed"
            )
    conditions = body.get("conditions")
    if (
        not isinstance(conditions, dict)
        or len(conditions) > _MOST
        or not all(map(_NAME.fullmatch, conditions))
    ):
        raise CorruptFile(f"{path}: expected conditions by name")
    if missing := [name for name in (*CONTROLS, "translated") if name not in conditions]:
        raise Refused(
            f"{path}: {', '.join(missing)} was not measured, and no score is shown without its controls; run "
            "`kvbridge eval run` with its default conditions"
        )
    texts = [body.get(key) for key in ("headline", "verdict")]
    counts = [body.get(key) for key in ("n", "documents")]
    if any(type(text) is not str for text in texts) or any(
        type(count) is not int for count in counts
    ):
        raise CorruptFile(f"{path}: expected a headline, a verdict and counts")
    rows = [[f"`{name}`", *_row(conditions[name], name, path)] for name in conditions]
    head = ["condition", "rows", *(title for title, _, _ in _METRICS.values())]
    table = "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
    return f"""## Evaluation

> {clean(str(texts[0]))[:1000].replace("<", "&lt;")}

{counts[0]} items from {counts[1]} documents; 95 % intervals clustered by document. `native` is the receiver's own prefill,
`sender` not switching; `token_only` reads no sender, `wrong_document` another document's.

{table}
"""


def _row(cells: Any, name: str, path: Path) -> list[str]:
    if not isinstance(cells, dict) or type(cells.get("n")) is not int:
        raise CorruptFile(f"{path}: expected the figures of {name}")
    return [str(cells["n"]), *(_cell(cells, metric, path) for metric in _METRICS)]


def _cell(cells: dict[str, Any], metric: str, path: Path) -> str:
    """`0.35 [0.30, 0.40]` in the metric's unit, – where it does not apply."""
    value, between = cells.get(metric), cells.get(f"{metric}_ci")
    _, scale, unit = _METRICS[metric]
    bounds = between if isinstance(between, list) else []
    if any(
        type(x) not in (int, float) or abs(x) > 1e6
        for x in (0 if value is None else value, *bounds)
    ):
        raise CorruptFile(f"{path}: {metric} holds something that is not a number")
    if value is None:
        return "–"
    places = 0 if unit else 2
    shown = f"{value * scale:.{places}f}" + (f" {unit}" if unit else "")
    return (
        f"{shown} [{', '.join(f'{x * scale:.{places}f}' for x in bounds)}]"
        if len(bounds) == 2
        else shown
    )
