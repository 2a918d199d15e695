"""Collects what a study of the gate needs, on the demo pair: a pool of requests, wrong caches, and a second rung.

    python -m kvbridge.eval.gate_pool --out runs/gate

The asset is fitted on half of the training documents; requests come from everything else. One JSON line per request
with every signal and what became of it; a cut run continues. `kvbridge.eval.gate_study` reads the lines.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
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
from kvbridge.geometry import KVGeometry
from kvbridge.models import Model
from kvbridge.prefill import capture
from kvbridge.repair import RepairPlan
from kvbridge.snapshot import KVSnapshot

PLAN, RUNG = RepairPlan(tail=17), RepairPlan(tail=49)
ENDS, CHARACTERS = 5, (160, 800)
TOGETHER, RUNG_EVERY = 8, 8
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


@cache
def disturbed(sender: Model) -> Model:
    """The sender with every weight a tenth off: another model with caches of the same shape."""
    draw = torch.Generator().manual_seed(0)
    other = copy.deepcopy(sender.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * parameter.abs().mean() * torch.randn(parameter.shape, generator=draw))
    return replace(sender, model=other)


def other_model(request: Request, donor: KVSnapshot, rng: Random) -> KVSnapshot:
    """The right text's cache, by the disturbed sender, under the sender's name."""
    del donor, rng
    found = capture(disturbed(demo_sender()), input_ids=request.snapshot.token_ids)
    return replace(request.snapshot, layers=found.layers)


@cache
def demo_sender() -> Model:
    """The demo sender, once."""
    return kvbridge.load("demo:sender")


ATTACKS: dict[str, Wrong] = {
    "other_model": other_model,
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


def record(seen: Seen, extras: Extras, case: str) -> dict[str, Any]:
    """One line of the pool."""
    kind = seen.request.id.partition("/")[0]
    row = {"id": seen.request.id, "document": seen.request.document, "kind": kind, "case": case}
    if seen.evidence is None:
        return {**row, "refused": str(seen.refusal)}
    columns, flops = read_signals(seen.evidence, extras)
    return {
        **row, "tokens": len(seen.evidence.ids), "signals": {n: round(v, 6) for n, v in columns.items()},
        "handoff_flops": seen.evidence.predicted_flops, "gate_flops": flops,
        "outcome": None if seen.outcome is None else asdict(seen.outcome),
    }  # fmt: skip


def right(bridge: Bridge, extras: Extras, part: Sequence[Sample], number: int) -> list[dict[str, Any]]:
    """Lines of a few samples as they are, some of them on a second rung, too."""
    requests = [r for s in part for r in requests_of(s, bridge.sender, bridge.receiver)]
    lines = [record(s, extras, "right") for s in watch_requests(bridge, requests, PLAN)]
    if number % RUNG_EVERY == 0:
        lines += [record(s, extras, "rung") for s in watch_requests(bridge, requests, RUNG)]
    return lines


def wrong(bridge: Bridge, extras: Extras, part: Sequence[Sample], number: int) -> list[dict[str, Any]]:
    """Lines of the same prompts over caches that are not theirs: another document's each, and ATTACKS for some."""
    requests = [r for s in part for r in requests_of(s, bridge.sender, bridge.receiver, native=False)]
    donors = [capture(bridge.sender, text) for text in other_texts({s.document for s in part}, number)]
    tried = []
    for at, request in enumerate(requests):
        donor = donors[at % len(donors)]
        if len(donor) < len(request.snapshot):
            continue
        cases = {"wrong_document": wrong_document, **(ATTACKS if at == number % len(requests) else {})}
        tried += [(c, replace(request, snapshot=f(request, donor, Random(request.id + c)))) for c, f in cases.items()]
    seen = watch_requests(bridge, [r for _, r in tried], PLAN, outcomes=False)
    return [record(s, extras, case) for (case, _), s in zip(tried, seen, strict=True)]


def other_texts(documents: set[str], number: int) -> list[str]:
    """Beginnings of three held-out texts that are of none of `documents`, other ones for another `number`."""
    texts = [r["text"][100:1200] for r in rows_of("test") if r["document"] not in documents]
    return [texts[(3 * number + i) % len(texts)] for i in range(3)]


PARTS = {"pool.jsonl": right, "wrong.jsonl": wrong}


def collect(name: str, bridge: Bridge, extras: Extras, pool: Sequence[Sample], out: Path) -> None:
    """Appends to out/name what is missing there, one line per batch of samples."""
    path, done = out / name, set()
    if path.exists():
        whole = path.read_bytes().rpartition(b"\n")[0]
        path.write_bytes(whole + b"\n" if whole else b"")
        done = {i for line in whole.splitlines() for i in json.loads(line)["samples"]}
    with path.open("a", encoding="utf-8") as file:
        for number, start in enumerate(range(0, len(pool), TOGETHER)):
            part = [s for s in pool[start : start + TOGETHER] if s.id not in done]
            if part:
                lines = PARTS[name](bridge, extras, part, number)
                file.write(json.dumps({"samples": [s.id for s in part], "rows": lines}) + "\n")
                file.flush()


def receiver_geometry() -> KVGeometry:
    """The demo receiver's."""
    return kvbridge.load("demo:receiver").geometry


def main() -> None:
    """Collects into --out until everything is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gate"))
    parser.add_argument("--wrong", type=int, default=1300, help="samples that are also tried with wrong caches")
    parser.add_argument("--limit", type=int, default=None, help="samples")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sender, receiver = demo_sender(), kvbridge.load("demo:receiver")
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    bridge, extras = prepare(sender, receiver, out)
    pool = samples({d.group for d in fit_documents()})[: arguments.limit]
    for name in PARTS:
        collect(name, bridge, extras, pool if name == "pool.jsonl" else pool[: arguments.wrong], out)


if __name__ == "__main__":
    main()
