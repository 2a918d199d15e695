"""Collects what a study of the gate needs, on the demo pair: a pool of requests, wrong caches, and a second rung.

    python -m kvbridge.eval.gate_pool --out runs/gate

The asset is fitted on half of the training documents; requests come from everything else. One JSON line per request
with every signal and what became of it; a cut run continues. `kvbridge.eval.gate_study` reads the lines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

import kvbridge
from kvbridge import demo
from kvbridge.asset import load_asset, save_asset
from kvbridge.bridge import Bridge
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.data import Document
from kvbridge.fitting.job import fit
from kvbridge.gates.calibrate import gather, read_signals
from kvbridge.gates.extras import Extras
from kvbridge.gates.passing import Request, Sample, Seen, requests_of, watch_requests
from kvbridge.models import Model
from kvbridge.prefill import capture
from kvbridge.repair import RepairPlan
from kvbridge.snapshot import KVSnapshot

ROWS = "pool.jsonl"
PLAN, RUNG = RepairPlan(tail=17), RepairPlan(tail=49)
ENDS, CHARACTERS = 5, (160, 800)
WRONG_EVERY, ATTACK_EVERY, RUNG_EVERY = 5, 60, 8
Wrong = Callable[[Request, KVSnapshot, Random], KVSnapshot]


def rows_of(split: str) -> list[dict[str, Any]]:
    """A split of the demo's texts."""
    return [json.loads(line) for line in demo.texts(split).read_text("utf-8").splitlines()]


def fit_documents() -> list[Document]:
    """Half of the training documents, and validation documents for λ and scores; every text bears its split."""
    train, validation = rows_of("train"), rows_of("validation")
    used = set(sorted({r["document"] for r in train})[::2])
    others = sorted({r["document"] for r in validation})
    splits = {**dict.fromkeys(used, "train"), **dict.fromkeys(others[0::4], "validation"), **dict.fromkeys(others[1::4], "test")}  # fmt: skip
    return [
        Document(r["id"], r["text"], r["document"], splits[r["document"]])
        for r in (*train[::2], *validation[::2])
        if r["document"] in splits
    ]


def samples(excluded: set[str]) -> list[Sample]:
    """Every other text with ENDS prompts of log-uniform length at word ends, and every recall item with one."""
    found = []
    for split in ("train", "validation", "test"):
        for row in rows_of(split):
            if row["document"] not in excluded:
                rng = Random(row["id"])
                low, high = CHARACTERS
                wanted = sorted(int(low * (high / low) ** rng.random()) for _ in range(ENDS))
                text = row["text"][: wanted[-1] + 200]
                ends = {text.rfind(" ", 0, n) for n in wanted}
                found.append(Sample(f"{split}/{row['id']}", row["document"], text, tuple(sorted(e for e in ends if e > 0))))  # fmt: skip
    for row in rows_of("recall"):
        if row["document"] not in excluded:
            prompt = row["context"] + row["question"]
            text = prompt + row["answer"]
            found.append(Sample(f"recall/{row['id']}", row["document"], text, (len(prompt),), answer=True))
    Random(7).shuffle(found)
    return found


def wrong_document(request: Request, donor: KVSnapshot, rng: Random) -> KVSnapshot:
    """Another document's cache under this prompt's ids and text digest."""
    del rng
    count = len(request.snapshot)
    return replace(request.snapshot, layers=tuple({n: t[:count] for n, t in x.items()} for x in donor.layers))


def shuffled(request: Request, donor: KVSnapshot, rng: Random) -> KVSnapshot:
    """The right rows in another order."""
    del donor
    order = torch.tensor(rng.sample(range(len(request.snapshot)), len(request.snapshot)))
    return replace(request.snapshot, layers=tuple({n: t[order] for n, t in x.items()} for x in request.snapshot.layers))


def half_wrong(request: Request, donor: KVSnapshot, rng: Random) -> KVSnapshot:
    """The first half another document's, the second half right: as when a text was edited and its cache kept."""
    del rng
    half = len(request.snapshot) // 2
    layers = tuple(
        {n: torch.cat((d[n][:half], t[half:])) for n, t in x.items()}
        for x, d in zip(request.snapshot.layers, donor.layers, strict=True)
    )
    return replace(request.snapshot, layers=layers)


def one_token(request: Request, donor: KVSnapshot, rng: Random) -> KVSnapshot:
    """One row of another document: the least edit there is."""
    at = rng.randrange(5, len(request.snapshot))
    layers = []
    for x, d in zip(request.snapshot.layers, donor.layers, strict=True):
        layers.append({n: torch.cat((t[:at], d[n][at : at + 1], t[at + 1 :])) for n, t in x.items()})
    return replace(request.snapshot, layers=tuple(layers))


def noisy(scale: float) -> Wrong:
    """Every row off by noise of `scale` times its size: a cache that another version of the model would give."""

    def run(request: Request, donor: KVSnapshot, rng: Random) -> KVSnapshot:
        del donor
        draw = torch.Generator().manual_seed(rng.randrange(1 << 30))
        layers = tuple(
            {n: t + scale * t.abs().mean() * torch.randn(t.shape, generator=draw) for n, t in x.items()}
            for x in request.snapshot.layers
        )
        return replace(request.snapshot, layers=layers)

    return run


ATTACKS: dict[str, Wrong] = {
    "shuffled": shuffled,
    "half_wrong": half_wrong,
    "one_token": one_token,
    "noise_2%": noisy(0.02),
    "noise_20%": noisy(0.2),
}


def prepare(sender: Model, receiver: Model, out: Path) -> tuple[Bridge, Extras]:
    """The bridge and the gate's statistics, both from the fit's documents alone."""
    documents = fit_documents()
    path = out / "asset"
    if not path.exists():
        save_asset(fit(sender, receiver, documents, config=FitConfig(max_tokens=128)), path)
    bridge = Bridge(load_asset(path), sender=sender, receiver=receiver)
    train = [d for d in documents if d.split == "train"]
    some = [Sample(d.id, d.group, d.text[:700], (d.text.rfind(" ", 0, 640),)) for d in train[:: len(train) // 150]]
    return bridge, gather(bridge, some, PLAN)


def record(seen: Seen, extras: Extras, kind: str, case: str) -> dict[str, Any]:
    """One line of the pool."""
    row = {"id": seen.request.id, "document": seen.request.document, "kind": kind, "case": case}
    if seen.evidence is None:
        return {**row, "refused": str(seen.refusal)}
    columns, flops = read_signals(seen.evidence, extras)
    return {
        **row, "tokens": len(seen.evidence.ids), "signals": {n: round(v, 6) for n, v in columns.items()},
        "handoff_flops": seen.evidence.predicted_flops, "gate_flops": flops,
        "outcome": None if seen.outcome is None else asdict(seen.outcome),
    }  # fmt: skip


def batches(
    bridge: Bridge, extras: Extras, pool: Sequence[Sample], done: set[str]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(sample ids, lines) of a few samples at a time."""
    sender, receiver = bridge.sender, bridge.receiver
    for start in range(0, len(pool), 8):
        part = [s for s in pool[start : start + 8] if s.id not in done]
        if not part:
            continue
        lines: list[dict[str, Any]] = []
        requests = [(number, r) for number, s in enumerate(part, start) for r in requests_of(s, sender, receiver)]
        kinds = {r.id: r.id.partition("/")[0] for _, r in requests}
        plain = [r for _, r in requests]
        lines += [record(s, extras, kinds[s.request.id], "right") for s in watch_requests(bridge, plain, PLAN)]
        donor = capture(sender, pool[(start + 97) % len(pool)].text[:100] + " " + long_text(pool, start, part))
        wrong = [
            (case, replace(r, snapshot=make(r, donor, Random(r.id + case))))
            for at, r in enumerate(plain)
            for case, make in cases(at + start)
            if len(donor) >= len(r.snapshot)
        ]
        seen = watch_requests(bridge, [r for _, r in wrong], PLAN, outcomes=False)
        lines += [record(s, extras, kinds[s.request.id], case) for (case, _), s in zip(wrong, seen, strict=True)]
        if (start // 8) % RUNG_EVERY == 0:
            lines += [record(s, extras, kinds[s.request.id], "rung") for s in watch_requests(bridge, plain, RUNG)]
        yield "\n".join(s.id for s in part), lines


def cases(at: int) -> list[tuple[str, Wrong]]:
    """Which wrong caches request number `at` is tried with: three of five another document, a few something else."""
    found: list[tuple[str, Wrong]] = [("wrong_document", wrong_document)] if at % WRONG_EVERY < 3 else []
    if at % ATTACK_EVERY == 0:
        found += list(ATTACKS.items())
    return found


def long_text(pool: Sequence[Sample], start: int, part: Sequence[Sample]) -> str:
    """A long text of a document that none of `part` is of."""
    ours = {s.document for s in part}
    for step in range(1, len(pool)):
        other = pool[(start + 8 * step + 3) % len(pool)]
        if other.document not in ours and len(other.text) > 1000 and not other.answer:
            return other.text
    return ""


def main() -> None:
    """Collects into --out until everything is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gate"))
    parser.add_argument("--limit", type=int, default=None, help="samples")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sender, receiver = kvbridge.load("demo:sender"), kvbridge.load("demo:receiver")
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    bridge, extras = prepare(sender, receiver, out)
    pool = samples({d.group for d in fit_documents()})[: arguments.limit]
    path = out / ROWS
    done = set()
    if path.exists():
        lines = path.read_bytes().rpartition(b"\n")[0]
        path.write_bytes(lines + b"\n" if lines else b"")
        done = {i for line in lines.splitlines() for i in json.loads(line)["samples"]}
    with path.open("a", encoding="utf-8") as file:
        for names, lines in batches(bridge, extras, pool, done):
            file.write(json.dumps({"samples": names.split("\n"), "rows": lines}) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
