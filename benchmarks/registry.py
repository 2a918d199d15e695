"""What the store costs, against its bars: listing 10,000 pairs ≤ 200 ms, a publish ≤ 1.3× writing
and syncing the bytes.

    python -m benchmarks.registry [--folder DIR] [--megabytes 256] [--runs 7]

Prints one JSON document; exit code 1 where a bar is not met. Listing is the best of several runs.
Writing and publishing take turns, each from a synced disk, and the bar is on the median of their
ratios. `hash_s` is one SHA-256 of the same bytes in memory: no publish is quicker.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from kvbridge.cli.ending import run_to_the_end
from kvbridge.files import folder_digest, sums_of, sync_folder
from kvbridge.format import REF_SUFFIX, SUMS, TRANSLATOR
from kvbridge.registry.store import LocalStore
from kvbridge.registry.store.refs import Ref
from tests.registry import assets

PAIRS, LIST_BAR_MS, PUBLISH_BAR = 10_000, 200.0, 1.3


def seconds(act: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def list_ms(folder: Path) -> dict[str, float]:
    """A store of 10,000 pairs, made without syncing: first listing (an empty catalog) and later
    ones."""
    store = LocalStore(folder / "many")
    store.publish(assets.build(folder / "one"))
    weights = (folder / "one" / TRANSLATOR.tensors).read_bytes()
    for index in range(PAIRS - 1):
        sender = assets.geometry(f"org/sender-{index}")
        files = {**assets.files(sender, seed=0), TRANSLATOR.tensors: weights}
        digest = folder_digest(files)
        target = store.home / "objects" / digest
        target.mkdir()
        for name in TRANSLATOR.required:
            (target / name).write_bytes(files[name])
        (target / SUMS).write_bytes(sums_of({name: "0" * 64 for name in files}))
        label = f"org/sender-{index}..org/receiver"
        ref = Ref("translator", (sender.digest, "r"), "main", digest, label=label)
        (store.home / "refs" / f"{ref.key}{REF_SUFFIX}").write_bytes(ref.to_bytes())
    first = seconds(store.entries)
    time.sleep(2.5)
    seconds(store.entries)
    runs = [seconds(store.entries) for _ in range(9)]
    assert len(store.entries()) == PAIRS
    return {
        "pairs": PAIRS,
        "first_ms": 1e3 * first,
        "best_ms": 1e3 * min(runs),
        "worst_ms": 1e3 * max(runs),
    }


def publish_ratio(folder: Path, megabytes: int, runs: int) -> dict[str, object]:
    """Publishing an asset of about that size, against writing and syncing the same files in a plain
    folder, in turn."""
    width = max(8, int((megabytes * 1e6 / 64) ** 0.5))
    sender, receiver = (
        assets.geometry("a/s", width=width, layers=2),
        assets.geometry("a/r", width=width, layers=2),
    )
    source = assets.build(folder / "source", sender, receiver, dtype=np.float32)
    data = {path.name: path.read_bytes() for path in source.iterdir()}
    size = sum(map(len, data.values()))
    store, plain, published = LocalStore(folder / "store"), [], []
    store.publish(assets.build(folder / "first"))

    def write() -> None:
        target = folder / "plain"
        target.mkdir()
        for name, content in data.items():
            with (target / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        sync_folder(target)

    hashed = min(seconds(lambda: hashlib.sha256(data[TRANSLATOR.tensors])) for _ in range(3))
    for _ in range(runs):
        plain.append(seconds(write))
        shutil.rmtree(folder / "plain")
        os.sync()
        published.append(seconds(lambda: store.publish(source)))
        store.remove(store.select("a/s..a/r").ref)  # type: ignore[arg-type]
        store.collect()
        os.sync()
    ratios = sorted(p / w for p, w in zip(published, plain, strict=True))
    return {
        "bytes": size,
        "hash_s": hashed,
        "write_s": min(plain),
        "publish_s": min(published),
        "ratio_of_best": min(published) / min(plain),
        "ratio_median": statistics.median(ratios),
        "ratios": [round(ratio, 2) for ratio in ratios],
    }


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def measure(
    folder: Annotated[
        Path | None,
        typer.Option(help="Work on the file system of this folder; by default the temporary one."),
    ] = None,
    megabytes: Annotated[int, typer.Option(help="Size of the published asset.")] = 256,
    runs: Annotated[int, typer.Option(help="Publishes to take the median of.")] = 7,
) -> None:
    """Measure what the store costs: a listing of 10,000 pairs and a publish.

    The bars are 200 ms for the listing, and for the publish 1.3 times what it takes to write and
    sync the same bytes. One JSON document is printed; the exit code is 1 where a bar is not met.
    """
    work = Path(tempfile.mkdtemp(prefix="kvbridge-bench-", dir=folder))
    try:
        published, listed = publish_ratio(work, megabytes, runs), list_ms(work)
    finally:
        shutil.rmtree(work)
    met = listed["best_ms"] <= LIST_BAR_MS and float(str(published["ratio_median"])) <= PUBLISH_BAR
    print(json.dumps({"publish": published, "list": listed, "bars_met": met}, indent=1))
    raise typer.Exit(0 if met else 1)


if __name__ == "__main__":
    run_to_the_end(app, "python -m benchmarks.registry")
