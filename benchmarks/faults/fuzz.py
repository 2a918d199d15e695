"""Fuzzes everything that reads a byte of an asset before its digest is known: manifest, header, sums, references.

    python -m benchmarks.faults.fuzz CORPUS -runs=10000000 -rss_limit_mb=1024        (needs atheris 3.0.0)

It starts from the seeds below. Most mutations keep JSON valid; with --plain they are of bytes alone, and ten times as many
run a second. Anything but a KVBridgeError out of a reader is a finding.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

from benchmarks.faults.mutate import mutate

with atheris.instrument_imports(include=["kvbridge"]):
    from benchmarks.faults.readers import one, seeds


def main() -> None:
    """The command."""
    folder = Path(next((a for a in sys.argv[1:] if not a.startswith("-")), "/tmp/kvbridge-fuzz"))
    seeds(folder)
    options = [a for a in sys.argv[1:] if a.startswith("-")]
    arguments = [sys.argv[0], str(folder), "-max_len=6000", "-timeout=20", *options]
    if "--plain" in options:
        atheris.Setup([a for a in arguments if a != "--plain"], one)
    else:
        atheris.Setup(
            arguments,
            one,
            custom_mutator=lambda data, most, seed: mutate(data, most, seed, atheris.Mutate),
        )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
