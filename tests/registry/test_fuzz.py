"""A short run of what `python -m benchmarks.faults fuzz` does for hours; docs/registry-faults.md
has the long run."""

from __future__ import annotations

import random
import subprocess
import sys
from importlib.util import find_spec

import pytest

from benchmarks.faults.mutate import mutate
from benchmarks.faults.readers import one, seeds


def flip(chance: random.Random):
    """Byte mutations without atheris."""

    def change(data: bytes, most: int) -> bytes:
        changed = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 8))):
            spot = chance.randrange(len(changed) + 1)
            changed[spot : spot + chance.choice((0, 1, 1, 4))] = chance.randbytes(
                chance.choice((0, 1, 1, 8))
            )
        return bytes(changed[:most])

    return change


def test_readers_raise_our_errors_only(tmp_path):
    seeds(tmp_path)
    corpus, chance = [path.read_bytes() for path in sorted(tmp_path.iterdir())], random.Random(0)
    for seed in range(3_000):
        data = chance.choice(corpus)
        for _ in range(chance.choice((1, 2, 5))):
            data = mutate(data, 6000, seed, flip(chance))
        one(data)


@pytest.mark.skipif(find_spec("atheris") is None, reason="needs atheris 3.0.0 (extra `fuzz`)")
def test_atheris(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.faults",
        "fuzz",
        str(tmp_path / "corpus"),
        "--plain",
        "-runs=100000",
        "-rss_limit_mb=512",
        f"-artifact_prefix={tmp_path}/",
    ]
    # A process starts with the peak memory of the one that forked it, here that of all tests
    # before: a shell comes between.
    done = subprocess.run(
        ["sh", "-c", '"$@"; exit $?', "sh", *command], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Done 100000 runs" in done.stderr
