"""Fuzzing of everything that reads a byte of an asset before its digest is known: manifest, header,
sums, references. Anything but a KVBridgeError out of a reader is a finding.
"""

from __future__ import annotations

from pathlib import Path

import atheris

from benchmarks.faults.mutate import mutate

with atheris.instrument_imports(include=["kvbridge"]):
    from benchmarks.faults.readers import one, seeds


def fuzz(corpus: Path, plain: bool, options: list[str]) -> None:
    """Mutates and reads until libFuzzer's `options` say to stop, and ends the process. `plain`:
    bytes alone are mutated, else most mutations keep JSON valid."""
    seeds(corpus)
    arguments = ["fuzz", str(corpus), "-max_len=6000", "-timeout=20", *options]
    if plain:
        atheris.Setup(arguments, one)
    else:
        atheris.Setup(arguments, one, custom_mutator=_keeping_json)
    atheris.Fuzz()


def _keeping_json(data: bytes, most: int, seed: int) -> bytes:
    return mutate(data, most, seed, atheris.Mutate)
