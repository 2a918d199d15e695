"""SIGKILL at random points of publish, pull and collection, alone and against each other.

Each round forks one or two children that act on one store, kills them after a random time, and
checks the store: the tag stands for the old asset or the new one, whole; every object is whole;
what an unharmed child reported is there; a collection then leaves nothing but what names stand for.
A share of the rounds runs with locks that do nothing.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars

from kvbridge.errors import StoreError
from kvbridge.registry.hub import Hub
from kvbridge.registry.store import LocalStore
from kvbridge.registry.store.refs import Ref
from tests.registry import assets

REPO = "org/pair"


@dataclass
class Report:
    """What a campaign did. `kills[action]` counts children that died in the act, `finished` those
    that were quicker."""

    kills: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    orphans: int = 0
    rounds: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds in {self.seconds:.0f} s; killed {self.kills.total()} "
            f"{dict(self.kills)}; "
            f"finished {dict(self.finished)}; refused {dict(self.refused)}; orphans collected "
            f"{self.orphans}; "
            "0 losses"
        )


class Campaign:
    """One store under fire. `folder` is emptied by the caller."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.assets = [assets.build(folder / f"asset{i}", seed=i) for i in range(3)]
        self.report = Report()
        self.longest: dict[str, float] = dict.fromkeys(("publish", "pull", "gc"), 0.02)
        constants.HF_HUB_OFFLINE = False
        disable_progress_bars()
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.registry.hub_server", str(folder / "address")]
        )
        while not (folder / "address").exists() or not (folder / "address").read_text():
            time.sleep(0.02)
        self.address = (folder / "address").read_text()
        self.store = LocalStore(folder / "home")
        self.digests = [self.store.publish(path).digest for path in self.assets]
        self.refs = [self.store.publish(path) for path in self.assets]
        for digest in self.digests:
            assert self._wait(self._fork(partial(self._push, digest))) == 0

    def _push(self, digest: str) -> None:
        Hub(self.address).push(self.store, digest, REPO, tag=digest[:12])

    def close(self) -> None:
        """Ends the server."""
        self.server.kill()
        self.server.wait()

    def run(self, kills: int) -> Report:
        """Rounds until that many children were killed in the act."""
        start = time.monotonic()
        while self.report.kills.total() < kills:
            self.round(pair=self.random.random() < 0.4)
            if self.report.rounds % 500 == 0:
                print(f"[{time.strftime('%H:%M:%S')}] {self.report}", flush=True)
            self.report.seconds = time.monotonic() - start
        return self.report

    def round(self, pair: bool) -> None:
        """One round: fork, kill, check, and now and then collect."""
        self.report.rounds += 1
        before = self._current().digest
        wants: list[str] = []
        children: list[tuple[int, str, str | None]] = []
        for _ in range(2 if pair else 1):
            name, wanted, act = self._action()
            wants += [] if wanted is None else [wanted]
            children.append((self._fork(act, locks=self.random.random() < 0.7), name, wanted))
        time.sleep(self.random.random() * 1.1 * max(self.longest[c[1]] for c in children))
        done = [(name, wanted, self._end(pid, name)) for pid, name, wanted in children]
        now = self._current().digest
        assert now in {before, *wants}, f"the tag stands for {now}"
        if len(done) == 1 and done[0][2] == 0 and done[0][1] is not None:
            assert now == done[0][1], "a finished publish is not there"
        self.check()
        if self.report.rounds % 7 == 0:
            self.collect()

    def check(self) -> None:
        """The named asset is whole, so is every object, and the listing agrees."""
        self.store.verify(self._current().digest)
        for path in (self.store.home / "objects").iterdir():
            self.store.verify(path.name)
        listed = [e for e in self.store.entries() if e.problem is None and e.ref is not None]
        assert [e.ref.digest for e in listed if e.ref is not None] == [self._current().digest]
        assert not list((self.store.home / "quarantine").iterdir())

    def collect(self) -> None:
        """Nothing but what the name stands for is left after a collection."""
        plan = self.store.collect()
        self.report.orphans += len(plan.stages) + len(plan.trash) + len(plan.objects)
        left = [
            p.name for f in ("objects", "tmp", "trash") for p in (self.store.home / f).iterdir()
        ]
        assert left == [self._current().digest], left

    def _current(self) -> Ref:
        ref = self.store.ref("translator", self.refs[0].scope)
        assert ref is not None, "the tag is gone"
        return ref

    def _action(self) -> tuple[str, str | None, Callable[[], object]]:
        which = self.random.randrange(3)
        name = self.random.choice(["publish", "publish", "publish", "pull", "gc", "gc"])
        if name == "gc":
            return name, None, self.store.collect
        if name == "publish":
            return name, self.digests[which], lambda: self.store.publish(self.assets[which])
        revision = self.digests[which][:12]
        return (
            name,
            self.digests[which],
            lambda: Hub(self.address).pull(self.store, REPO, revision=revision),
        )

    def _fork(self, act: Callable[[], object], locks: bool = True) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            if not locks:
                fcntl.flock = lambda *args: None
            act()
            code = 0
        except StoreError:
            code = 3
        except Exception:  # noqa: BLE001 - whatever it is, the parent sees exit code 1 and stops
            traceback.print_exc()
        finally:
            os._exit(code)

    def _end(self, pid: int, name: str) -> int:
        os.kill(pid, signal.SIGKILL)
        code = self._wait(pid)
        if code == -signal.SIGKILL:
            self.report.kills[name] += 1
        else:
            assert code in (0, 3), f"{name} ended with {code}"
            self.report.finished[name] += code == 0
            self.report.refused[name] += code == 3
        return code

    def calibrate(self, rounds: int) -> None:
        """How long each action takes when it is left alone."""
        for _ in range(rounds):
            name, _, act = self._action()
            began = time.monotonic()
            self._wait(self._fork(act))
            self.longest[name] = max(self.longest[name], time.monotonic() - began)

    def _wait(self, pid: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def campaign(kills: int, seed: int, folder: Path | None = None) -> Report:
    """Runs one in a folder of its own, which is removed when nothing was found and kept
    otherwise."""
    work = Path(tempfile.mkdtemp(prefix="kvbridge-campaign-", dir=folder))
    one = Campaign(work, seed)
    try:
        one.calibrate(min(30, max(9, kills // 4)))
        report = one.run(kills)
    finally:
        one.close()
    shutil.rmtree(work)
    return report
