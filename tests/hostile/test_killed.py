"""A save that is killed leaves nothing under the final name, or everything."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import kvbridge
from kvbridge.format import CONTROL_SET
from tests.hostile.forge import made_fit

KILLS = 30
# Saves forever under new names in one process (importing torch for each save would take seconds):
# "n" says save n begins.
WRITER = """
import os, sys, itertools
from pathlib import Path
from kvbridge.files import publish_folder, write_file
source, folder = Path(sys.argv[1]), Path(sys.argv[2])
files = {p.name: p.read_bytes() for p in source.iterdir() if p.name != "SHA256SUMS"}
for n in itertools.count(int(sys.argv[3])):
    os.write(1, b"%d\\n" % n)
    publish_folder(folder / f"asset{n}", files)
    write_file(folder / f"file{n}", files["weights.safetensors"])
"""


def test_a_killed_save_leaves_nothing_or_everything(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "out"
    digest = kvbridge.save_asset(made_fit(), source)
    weights = (source / "weights.safetensors").read_bytes()
    folder.mkdir()
    draw = random.Random(0)
    begun = seen_whole = seen_none = 0
    for number in range(KILLS):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(source), str(folder), str(begun)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        ) as process:
            assert process.stdout is not None
            for _ in range(
                1 + number % 2
            ):  # every other one is killed after a whole save, however slow the disk is
                last = int(process.stdout.readline())
            os.set_blocking(process.stdout.fileno(), False)
            try:
                process.wait(timeout=draw.random() * 0.02)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
            process.wait()
            lines = (process.stdout.read() or b"").decode().split()
            last = int(lines[-1]) if lines else last
        for n in range(begun, last + 1):
            asset, file = folder / f"asset{n}", folder / f"file{n}"
            if asset.exists():
                assert kvbridge.load_asset(asset).digest == digest
                seen_whole += 1
            else:
                assert n == last
                seen_none += 1
            assert not file.exists() or file.read_bytes() == weights
            assert file.exists() or n == last
        begun = last + 1
    assert seen_whole
    assert seen_none, "no kill came before the rename: the test proves nothing"
    strange = [
        p.name
        for p in folder.iterdir()
        if not p.name.startswith(("asset", "file")) and not p.name.endswith(".tmp")
    ]
    assert strange == []


def test_an_interrupted_save_can_be_repeated(tmp_path, monkeypatch):
    path = tmp_path / "asset"
    calls = []
    fsync = os.fsync

    def failing(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", failing)
    try:
        kvbridge.save_asset(made_fit(), path)
        raise AssertionError("the disk was full")
    except OSError:
        assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    kvbridge.save_asset(made_fit(), path)
    kvbridge.load_controls(kvbridge.load_asset(path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["asset", CONTROL_SET.beside(path).name]
