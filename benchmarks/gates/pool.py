"""Collects what a study of the gate needs: a pool of requests, wrong caches, and a second rung.

    python -m benchmarks.gates.pool --out runs/gate                                   # the demo pair
    python -m benchmarks.gates.pool --out runs/gate-real --asset A --data texts      # any other

Requests come from documents that the fit has not seen. One JSON line per batch with every signal and what became of
each request; a cut run continues. `benchmarks.gates.study` reads the lines.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.gates.attacks import ATTACKS, wrong_document
from benchmarks.gates.source import Source, data_source, demo_source
from kvbridge.cache.prefill import capture
from kvbridge.errors import KVBridgeError, UsageError
from kvbridge.files import write_file
from kvbridge.gates.calibrate.job import gather, read_signals
from kvbridge.gates.calibrate.passing import Sample, Seen, prompts_of, watch_prompts
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
    """The same prompts over caches that are not theirs: another document's each, and ATTACKS for one of the batch."""
    bridge = source.bridge
    requests = [
        r for s in part for r in prompts_of(s, bridge.sender, bridge.receiver, native=False)
    ]
    donors = [
        capture(bridge.sender, text)
        for text in other_texts(source, {s.document for s in part}, number)
    ]
    tried = []
    for at, request in enumerate(requests):
        donor = donors[at % len(donors)]
        if len(donor) < len(request.snapshot):
            continue
        cases = {
            "wrong_document": wrong_document,
            **(ATTACKS if at == number % len(requests) else {}),
        }
        tried += [
            (c, replace(request, snapshot=f(request, donor, Random(request.id + c), bridge.sender)))
            for c, f in cases.items()
        ]
    seen = watch_prompts(bridge, [r for _, r in tried], PLAN, outcomes=False)
    return [record(s, extras, case) for (case, _), s in zip(tried, seen, strict=True)]


def other_texts(source: Source, documents: set[str], number: int) -> list[str]:
    """DONORS texts that are of none of `documents`, other ones for another `number`."""
    texts = [text for document, text in source.donors if document not in documents]
    return [texts[(DONORS * number + i) % len(texts)] for i in range(min(DONORS, len(texts)))]


Collect = Callable[[Source, Extras, Sequence[Sample], int], list[dict[str, Any]]]
PARTS: dict[str, Collect] = {"pool.jsonl": right, "wrong.jsonl": wrong}


def collect(name: str, source: Source, extras: Extras, pool: Sequence[Sample], out: Path) -> None:
    """Appends to out/name what is missing there, one line per batch of samples; progress goes to stderr."""
    path, done = out / name, set()
    if path.exists():
        whole = path.read_bytes().rpartition(b"\n")[0]
        path.write_bytes(whole + b"\n" if whole else b"")
        done = {i for line in whole.splitlines() for i in json.loads(line)["samples"]}
    start, count = time.process_time(), 0
    with path.open("a", encoding="utf-8") as file:
        for number, first in enumerate(range(0, len(pool), TOGETHER)):
            part = [s for s in pool[first : first + TOGETHER] if s.id not in done]
            if part:
                lines = PARTS[name](source, extras, part, number)
                file.write(json.dumps({"samples": [s.id for s in part], "rows": lines}) + "\n")
                file.flush()
                count += len(lines)
                spent = time.process_time() - start
                say = f"{name}: {first + len(part)} of {len(pool)} texts, {count} requests, {spent / max(1, count):.2f} CPU s each"
                print(say, file=sys.stderr, flush=True)


def bind(out: Path, source: Source) -> None:
    """Notes whose lines `out` holds. Raises UsageError where they are of another asset."""
    asset = source.bridge.asset
    assert asset is not None
    path, receiver = out / ABOUT, source.bridge.receiver
    if path.exists():
        before = json.loads(path.read_text("utf-8"))["translator"]
        if before != asset.digest:
            raise UsageError(
                f"{out}: expected lines of asset {asset.digest[:12]}, found {before[:12]}; use another --out"
            )
    elif any((out / name).exists() for name in PARTS):
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


def main() -> None:
    """Collects into --out until everything is there; exits 1 with one line on a refusal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gate"))
    parser.add_argument(
        "--asset",
        type=Path,
        default=None,
        help="an asset; the demo pair's is fitted into OUT/asset",
    )
    parser.add_argument(
        "--data", default=None, help="texts: their test split gives requests, validation statistics"
    )
    parser.add_argument(
        "--sender", default=None, help="where the manifest's id is not where it lies"
    )
    parser.add_argument("--receiver", default=None, help="likewise")
    parser.add_argument("--ends", type=int, default=None, help="prompts per text (demo 5, else 2)")
    parser.add_argument(
        "--wrong", type=int, default=1300, help="texts that are also tried with wrong caches"
    )
    parser.add_argument("--limit", type=int, default=None, help="texts")
    arguments = parser.parse_args()
    try:
        run(arguments)
    except KVBridgeError as error:
        print(f"kvbridge: {error}", file=sys.stderr)
        sys.exit(1)


def run(arguments: argparse.Namespace) -> None:
    """The collection that the arguments ask for."""
    out: Path = arguments.out
    if (arguments.data is None) != (arguments.asset is None):
        raise UsageError(
            "expected --asset and --data together, or neither of them for the demo pair"
        )
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    if arguments.data is None:
        source = demo_source(out / "asset", arguments.ends or 5)
    else:
        names = (arguments.sender, arguments.receiver)
        source = data_source(arguments.asset, arguments.data, names, arguments.ends or 2)
    bind(out, source)
    extras = gather(source.bridge, source.statistics, PLAN)
    pool = source.pool[: arguments.limit]
    for name in PARTS:
        collect(
            name, source, extras, pool if name == "pool.jsonl" else pool[: arguments.wrong], out
        )


if __name__ == "__main__":
    main()
