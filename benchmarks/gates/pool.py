"""Collects what a study of the gate needs: a pool of requests, wrong caches, and a second rung.

Requests come from documents that the fit has not seen. One JSON line per batch holds every signal
and what became of each request; a cut run continues. `study` reads the lines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.gates.attacks import ATTACKS, wrong_document
from benchmarks.gates.source import Source, data_source, demo_source
from kvbridge.cache.prefill import capture
from kvbridge.cli.progress import counted
from kvbridge.errors import UsageError
from kvbridge.files import write_file
from kvbridge.gates.calibrate.job import gather, read_signals
from kvbridge.gates.calibrate.passing import (
    CalibrationPrompt,
    Sample,
    Seen,
    prompts_of,
    watch_prompts,
)
from kvbridge.gates.signals.extras import Extras
from kvbridge.geometry import KVGeometry
from kvbridge.handoff.plan import RepairPlan

PLAN, RUNG = RepairPlan(tail=17), RepairPlan(tail=49)
TOGETHER, RUNG_EVERY, DONORS = 8, 8, 3
ABOUT = "about.json"


def record(seen: Seen, extras: Extras, case: str) -> dict[str, Any]:
    """One request: its signals, costs in FLOPs and what became of it."""
    kind = seen.prompt.id.partition("/")[0]
    row = {"id": seen.prompt.id, "document": seen.prompt.document, "kind": kind, "case": case}
    if seen.evidence is None:
        return {**row, "refused": str(seen.refusal)}
    columns, flops = read_signals(seen.evidence, extras)
    return {
        **row,
        "tokens": len(seen.evidence.ids),
        "signals": {n: round(v, 6) for n, v in columns.items()},
        "handoff_flops": seen.evidence.predicted_flops,
        "gate_flops": flops,
        "outcome": None if seen.outcome is None else asdict(seen.outcome),
    }


def right(
    source: Source, extras: Extras, part: Sequence[Sample], number: int
) -> list[dict[str, Any]]:
    """Requests of a few samples as they are, some of them on a second rung, too."""
    bridge = source.bridge
    requests = [r for s in part for r in prompts_of(s, bridge.sender, bridge.receiver)]
    lines = [record(s, extras, "right") for s in watch_prompts(bridge, requests, PLAN)]
    if number % RUNG_EVERY == 0:
        lines += [record(s, extras, "rung") for s in watch_prompts(bridge, requests, RUNG)]
    return lines


def wrong(
    source: Source, extras: Extras, part: Sequence[Sample], number: int
) -> list[dict[str, Any]]:
    """The same prompts over caches of something else: another document's each, and ATTACKS for one
    of the batch."""
    bridge = source.bridge
    requests: list[CalibrationPrompt] = []
    for sample in part:
        requests += prompts_of(sample, bridge.sender, bridge.receiver, native=False)
    texts = other_texts(source, {sample.document for sample in part}, number)
    donors = [capture(bridge.sender, text) for text in texts]
    cases: list[str] = []
    tried: list[CalibrationPrompt] = []
    for at, request in enumerate(requests):
        donor = donors[at % len(donors)]
        if len(donor) < len(request.snapshot):
            continue
        attacks = ATTACKS if at == number % len(requests) else {}
        for case, attack in {"wrong_document": wrong_document, **attacks}.items():
            snapshot = attack(request, donor, Random(request.id + case), bridge.sender)
            cases.append(case)
            tried.append(replace(request, snapshot=snapshot))
    seen = watch_prompts(bridge, tried, PLAN, outcomes=False)
    return [record(s, extras, case) for case, s in zip(cases, seen, strict=True)]


def other_texts(source: Source, documents: set[str], number: int) -> list[str]:
    """DONORS texts that are of none of `documents`, other ones for another `number`."""
    texts = [text for document, text in source.donors if document not in documents]
    return [texts[(DONORS * number + i) % len(texts)] for i in range(min(DONORS, len(texts)))]


Collect = Callable[[Source, Extras, Sequence[Sample], int], list[dict[str, Any]]]
COLLECTED: dict[str, Collect] = {"pool.jsonl": right, "wrong.jsonl": wrong}


def collect(name: str, source: Source, extras: Extras, pool: Sequence[Sample], out: Path) -> None:
    """Appends to out/name what is missing there, one line per batch of samples; progress goes to
    stderr."""
    path = out / name
    done = _samples_in(path)
    with path.open("a", encoding="utf-8") as file, counted(name) as progress:
        for number, first in enumerate(range(0, len(pool), TOGETHER)):
            part = [sample for sample in pool[first : first + TOGETHER] if sample.id not in done]
            if part:
                rows = COLLECTED[name](source, extras, part, number)
                line = {"samples": [sample.id for sample in part], "rows": rows}
                file.write(json.dumps(line) + "\n")
                file.flush()
            progress(min(first + TOGETHER, len(pool)), len(pool), "texts")


def _samples_in(path: Path) -> set[str]:
    """Samples whose lines are there; a line that was cut is removed."""
    if not path.exists():
        return set()
    whole = path.read_bytes().rpartition(b"\n")[0]
    path.write_bytes(whole + b"\n" if whole else b"")
    return {sample for line in whole.splitlines() for sample in json.loads(line)["samples"]}


def bind(out: Path, source: Source) -> None:
    """Notes whose lines `out` holds. Raises UsageError where they are of another asset."""
    asset = source.bridge.asset
    assert asset is not None
    path, receiver = out / ABOUT, source.bridge.receiver
    if path.exists():
        before = json.loads(path.read_text("utf-8"))["translator"]
        if before != asset.digest:
            raise UsageError(
                f"{out}: expected lines of asset {asset.digest[:12]}, found {before[:12]}; "
                "use another --out"
            )
    elif any((out / name).exists() for name in COLLECTED):
        raise UsageError(f"{out}: its lines name no asset; use another --out")
    body = {
        "translator": asset.digest,
        "sender": source.bridge.sender.name,
        "receiver": receiver.name,
        "geometry": receiver.geometry.to_json(),
    }
    write_file(path, (json.dumps(body, indent=1) + "\n").encode())


def receiver_geometry(out: Path) -> KVGeometry:
    """The receiver's, as noted in a folder of lines."""
    return KVGeometry.from_json(json.loads((out / ABOUT).read_text("utf-8"))["geometry"])


@dataclass(frozen=True)
class CollectCommand:
    """What was asked for on the command line. `asset` and `data` None: the demo pair; `ends`:
    prompts per text (None: 5 of the demo's, else 2); `wrong`: how many of at most `limit` texts are
    also tried with wrong caches; `sender` and `receiver`: where the models lie, if not where the
    manifest says."""

    out: Path
    asset: Path | None = None
    data: str | None = None
    sender: str | None = None
    receiver: str | None = None
    ends: int | None = None
    wrong: int = 1300
    limit: int | None = None


def run(asked: CollectCommand) -> None:
    """Collects until everything is there. Raises UsageError for half a pair."""
    source = _source(asked)
    bind(asked.out, source)
    extras = gather(source.bridge, source.statistics, PLAN)
    pool = source.pool[: asked.limit]
    for name, work in COLLECTED.items():
        collect(name, source, extras, pool[: asked.wrong] if work is wrong else pool, asked.out)


def _source(asked: CollectCommand) -> Source:
    if (asked.data is None) != (asked.asset is None):
        raise UsageError(
            "expected --asset and --data together, or neither of them for the demo pair"
        )
    torch.set_num_threads(1)
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.data is None or asked.asset is None:
        return demo_source(asked.out / "asset", asked.ends or 5)
    names = (asked.sender, asked.receiver)
    return data_source(asked.asset, asked.data, names, asked.ends or 2)
