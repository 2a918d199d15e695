"""An evaluation run: items × conditions → rows, resumable, each row exactly once, then summary and
report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvbridge.codec import parse_json
from kvbridge.errors import CorruptFile, EvalError, KVBridgeError
from kvbridge.eval.conditions.names import check_names, condition, defaults, ordered
from kvbridge.eval.conditions.prompt import Prompt
from kvbridge.eval.conditions.setup import Setup
from kvbridge.eval.run.config import RunConfig
from kvbridge.eval.run.rows import Row, RowWriter
from kvbridge.eval.tasks import TASKS
from kvbridge.eval.tasks.base import Scored, compare
from kvbridge.eval.tasks.chosen import Excluded, commonest_reasons, donors
from kvbridge.eval.tasks.items import Item
from kvbridge.files import write_file
from kvbridge.format import RUN_META, RUN_ROWS
from kvbridge.geometry import digest_json


@dataclass(frozen=True)
class Job:
    """One item and what is still to be computed of it: `donor` is another document's text, `pair`
    goes into the rows."""

    pair: str
    item: Item
    donor: str
    conditions: tuple[str, ...]


Compute = Callable[[Iterable[Job]], Iterable[list[Row]]]


def evaluate(
    setup: Setup,
    items: Sequence[Item],
    out: Path,
    *,
    config: RunConfig | None = None,
    excluded: Sequence[Excluded] = (),
    meta: dict[str, Any] | None = None,
    compute: Compute | None = None,
) -> Path:
    """Runs every condition of `config` on every item and appends what is missing to
    `out/rows.jsonl`; returns that path.

    Without conditions those of `names.defaults`. A cut run continues; a row that cannot be
    computed is written as excluded with its reason. `meta` goes into the run's description.
    `compute` takes jobs and gives their rows in order, by default here and now
    (kvbridge.eval.run.workers: on several processes). Raises EvalError for unknown conditions, too
    few items, or rows of another pair or of other texts.
    """
    config = config or RunConfig()
    wanted = defaults(setup) if config.conditions is None else config.conditions
    conditions = tuple(ordered(wanted))
    check_names(conditions)
    if len({item.document for item in items}) < 2:
        reasons = commonest_reasons(excluded)
        why = f"; {len(excluded)} rows were left out, {reasons}" if reasons else ""
        raise EvalError(
            "expected items of at least 2 documents (another one is needed as the wrong document), "
            f"found {len(items)} items{why}"
        )
    out.mkdir(parents=True, exist_ok=True)
    pair = pair_digest(setup)
    with RowWriter(out / RUN_ROWS, pair) as writer:
        used = _same_items(out / RUN_META, items, writer)
        body = {
            **(meta or {}),
            "pair": pair_meta(setup),
            "items": used,
            "data": _same_data(out / RUN_META, config.data, writer),
        }
        write_file(out / RUN_META, (json.dumps(body, indent=1, sort_keys=True) + "\n").encode())
        for lost in excluded:
            for name in conditions:
                if (lost.id, lost.task, name) not in writer.done:
                    writer.write(
                        _unusable(pair, lost.id, lost.document, lost.task, name, lost.reason)
                    )
        others = donors(items)
        jobs = []
        for item in items:
            missing = tuple(c for c in conditions if (item.id, item.task, c) not in writer.done)
            if missing:
                jobs.append(Job(pair, item, others[item.id], missing))
        here = (item_rows(setup, job) for job in jobs)
        computed = here if compute is None else compute(jobs)
        for number, rows in enumerate(computed, len(items) - len(jobs) + 1):
            writer.write_all(rows)
            if config.progress is not None:
                config.progress(number, len(items), rows[0].task)
    return out / RUN_ROWS


def _same_items(path: Path, items: Sequence[Item], writer: RowWriter) -> dict[str, str]:
    """A digest of what each item asks; EvalError where a row stands for an item that now asks
    something else."""
    used = {f"{i.task}/{i.id}": digest_json([i.prompt, i.answers, i.options])[:16] for i in items}
    before = (
        json.loads(path.read_text("utf-8")).get("items", {})
        if path.exists() and writer.done
        else {}
    )
    changed = sorted(name for name in used.keys() & before.keys() if used[name] != before[name])
    if changed:
        raise EvalError(
            f"{path.parent}: {len(changed)} items have changed since its rows were written "
            f"({changed[0]}); use another --out"
        )
    return {**before, **used}


def _same_data(path: Path, data: str | None, writer: RowWriter) -> str | None:
    """The digest to keep; EvalError where the rows that stand are from other texts, whatever their
    ids."""
    before = (
        json.loads(path.read_text("utf-8")).get("data") if path.exists() and writer.done else None
    )
    _check_same(path.parent, "of other texts", before, data)
    return data or before


def _check_same(out: Path, what: str, was: Any, now: str | None) -> None:
    """Raises EvalError where both digests are known and differ."""
    if now is not None and was is not None and was != now:
        raise EvalError(
            f"{out}: its rows are {what} ({str(was)[:12]}, found {now[:12]}); use another --out"
        )


def check_run(out: Path, translator: str, data: str) -> None:
    """Raises EvalError where the rows that stand in `out` are of another translator or of other
    texts (digests): what `evaluate` would say, too, once models are loaded."""
    rows, path = out / RUN_ROWS, out / RUN_META
    if not rows.exists() or not rows.stat().st_size or not path.exists():
        return
    before = parse_json(path.read_bytes(), str(path))
    if not isinstance(before, dict):
        raise CorruptFile(f"{path}: expected a JSON object; use another --out")
    _check_same(
        out, "of another translator", before.get("pair", {}).get("translator_digest"), translator
    )
    _check_same(out, "of other texts", before.get("data"), data)


def pair_digest(setup: Setup) -> str:
    """Digest of both models, the translator, its controls, the repair and the gate: rows of
    different ones never mix."""
    asset = setup.bridge.asset
    translator = asset.digest if asset is not None else None
    plans = [[p.sinks, p.tail, p.layers, list(p.tokens)] for p in setup.plans]
    plan = plans[0] if len(plans) == 1 else plans
    models = [setup.sender.geometry.digest, setup.receiver.geometry.digest]
    return digest_json([*models, translator, setup.controls_digest, plan, gate_name(setup)])


def gate_name(setup: Setup) -> str | None:
    """The gate's calibration by its digest, else its name or type; None without a gate."""
    if setup.gated is None:
        return None
    calibration = getattr(setup.gated.gate, "calibration", None)
    if calibration is not None:
        return str(calibration.digest)
    return str(getattr(setup.gated.gate, "name", type(setup.gated.gate).__name__))


def pair_meta(setup: Setup) -> dict[str, Any]:
    """Who the pair is."""
    asset = setup.bridge.asset
    return {
        "digest": pair_digest(setup),
        "sender": setup.sender.name,
        "receiver": setup.receiver.name,
        "sender_digest": setup.sender.geometry.digest,
        "receiver_digest": setup.receiver.geometry.digest,
        "translator_digest": asset.digest if asset is not None else None,
        "controls_digest": setup.controls_digest,
        "gate": gate_name(setup),
        **({} if setup.ladder is None else {"gate_tails": list(setup.tails)}),
    }


def item_rows(setup: Setup, job: Job) -> list[Row]:
    """Rows of one item; native runs first, also when only its distribution is needed."""
    pair, item, conditions = job.pair, job.item, job.conditions
    prompt, task = Prompt(setup, item, job.donor), TASKS[item.task]
    own: Scored | None = None
    rows = []
    for name in ordered({"native", *conditions}):
        try:
            start = condition(name)(prompt)
            if start.scored is None:
                start.scored = task.score(item, start)
            scored = start.scored
        except (KVBridgeError, torch.OutOfMemoryError) as error:
            if name in conditions:
                rows.append(_unusable(pair, item.id, item.document, item.task, name, str(error)))
            continue
        if name == "native":
            own = scored
        if name not in conditions:
            continue
        kl, agreement = None, None
        if (
            own is not None
            and own.distribution is not None
            and start.model is setup.receiver
            and scored.distribution is not None
        ):
            kl, agreement = compare(own.distribution, scored.distribution)
        rows.append(
            Row(
                pair=pair,
                item=item.id,
                document=item.document,
                conversation=item.conversation,
                task=item.task,
                condition=name,
                tail=start.tail,
                loss=scored.loss,
                tokens=scored.tokens,
                characters=scored.characters,
                kl=kl,
                agreement=agreement,
                correct=scored.correct,
                f1=scored.f1,
                chance=item.chance,
                flops=round(start.prefill_share * prompt.prefill_flops),
                prefill_share=start.prefill_share,
                ttft_ms=start.ttft_ms,
                verdict=start.verdict,
                score=start.score,
                reason=start.reason if start.verdict == "discard" else "",
            )
        )
    return rows


def _unusable(pair: str, item: str, document: str, task: str, condition: str, reason: str) -> Row:
    return Row(
        pair=pair,
        item=item,
        document=document,
        task=task,
        condition=condition,
        status="excluded",
        reason=reason,
    )
