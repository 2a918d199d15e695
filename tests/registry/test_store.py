"""Publishing, finding, binding, verifying, collecting; many writers; locks and clocks that cannot
be trusted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvbridge.errors import CorruptFile, NotInStore, Refused, StoreError, UsageError
from kvbridge.format import TRANSLATOR
from kvbridge.registry.store import LocalStore, default_home
from tests.registry import assets

SENDER, RECEIVER = assets.geometry("org/sender"), assets.geometry("org/receiver", width=6)


def test_published_bytes_are_the_source_s(store, asset):
    ref = store.publish(asset)
    for path in asset.iterdir():
        assert (store.path(ref.digest) / path.name).read_bytes() == path.read_bytes()
    assert store.find(SENDER, RECEIVER) == store.path(ref.digest)
    assert store.find(RECEIVER, SENDER) is None, "a translator has a direction"
    assert store.find(SENDER, RECEIVER, "other") is None


def test_an_asset_of_other_weights_is_not_found(store, asset):
    store.publish(asset)
    assert store.find(assets.geometry("org/sender", heads=1), RECEIVER) is None


def test_the_tag_moves_and_the_collection_takes_the_old_one(store, asset, newer):
    old, new = store.publish(asset), store.publish(newer)
    assert [e.ref.digest for e in store.entries()] == [new.digest]
    plan = store.plan()
    assert plan.objects == (old.digest,)
    assert store.path(old.digest).is_dir(), "a plan changes nothing"
    assert store.collect(plan).objects == (old.digest,)
    with pytest.raises(NotInStore):
        store.path(old.digest)
    assert store.collect().bytes == 0


def test_a_plan_that_is_outdated_spares_what_was_named_since(store, asset, newer):
    old = store.publish(asset)
    store.publish(newer)
    plan = store.plan()
    store.publish(asset, tag="kept")
    assert store.collect(plan).objects == ()
    assert store.verify(old.digest)


def test_two_tags_of_one_object(store, asset):
    ref = store.publish(asset)
    store.tag(ref.digest, "stable")
    store.remove(ref)
    assert store.collect().objects == ()
    assert store.select("org/sender..org/receiver@stable").ref.digest == ref.digest
    with pytest.raises(NotInStore):
        store.select("org/sender..org/receiver")


def test_what_is_bound_to_a_translator_lives_and_dies_with_it(store, asset, tmp_path):
    ref = store.publish(asset)
    bound = store.attach(assets.controls(tmp_path / "c", ref.digest))
    assert store.attached(ref.digest, "controls") == store.path(bound.digest)
    assert store.collect().objects == ()
    store.remove(ref)
    done = store.collect()
    assert set(done.objects) == {ref.digest, bound.digest}
    assert done.attachments == (bound.key,)
    assert store.entries() == []


def test_a_control_set_needs_its_translator(store, asset, tmp_path):
    store.publish(asset)
    with pytest.raises(NotInStore, match="publish or pull"):
        store.attach(assets.controls(tmp_path / "c", "0" * 64))
    with pytest.raises(UsageError, match="found a translator"):
        store.attach(asset)
    with pytest.raises(UsageError, match="attach a controls"):
        store.publish(tmp_path / "c")


def test_publishing_again_changes_nothing(store, asset):
    first = store.publish(asset)
    inode = os.stat(store.path(first.digest)).st_ino
    assert store.publish(asset) == first
    assert os.stat(store.path(first.digest)).st_ino == inode


def test_what_fails_its_digest_goes_to_quarantine_and_publishing_heals(store, asset):
    ref = store.publish(asset)
    weights = store.path(ref.digest) / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CorruptFile, match=r"SHA-256.*quarantine"):
        store.verify(ref.digest)
    with pytest.raises(NotInStore, match="quarantine"):
        store.find(SENDER, RECEIVER)
    assert [e.problem for e in store.entries()] == ["missing"]
    assert store.select("org/sender..org/receiver").ref == ref
    store.publish(asset)
    assert store.verify(ref.digest).digest == ref.digest
    kept = sorted((store.home / "quarantine").iterdir())
    assert kept[0].is_dir()
    assert "SHA-256" in kept[1].read_text()


def test_publishing_over_a_damaged_object_replaces_it(store, asset):
    ref = store.publish(asset)
    (store.path(ref.digest) / "README.md").write_bytes(b"")
    store.publish(asset)
    assert store.verify(ref.digest)


def test_an_intact_object_that_this_version_refuses_stays(store, asset, monkeypatch):
    ref = store.publish(asset)
    other = replace(TRANSLATOR, schema="kvbridge.translator/2")
    monkeypatch.setattr("kvbridge.asset.manifest.TRANSLATOR", other)
    with pytest.raises(Exception, match="use the matching kvbridge"):
        store.verify(ref.digest)
    assert store.path(ref.digest).is_dir()


def test_an_object_left_in_the_trash_by_a_killed_collection_comes_back(store, asset):
    ref = store.publish(asset)
    os.rename(store.path(ref.digest), store.home / "trash" / f"{ref.digest}.0")
    assert store.entries()[0].problem is None
    assert store.verify(ref.digest)
    os.rename(store.path(ref.digest), store.home / "trash" / f"{ref.digest}.0")
    assert store.find(SENDER, RECEIVER) is not None
    os.rename(store.path(ref.digest), store.home / "trash" / f"{ref.digest}.0")
    store.collect()
    assert store.verify(ref.digest)


def test_a_damaged_name_stops_a_collection_before_it_deletes(store, asset, newer):
    store.publish(newer, tag="other")
    ref = store.publish(asset)
    path = store.home / "refs" / f"{ref.key}.json"
    path.write_bytes(path.read_bytes()[:-9])
    assert store.plan().damaged == (path.name,)
    with pytest.raises(StoreError, match="nothing was lost"):
        store.collect()
    assert store.path(ref.digest).is_dir()
    assert any("damaged" in (e.problem or "") for e in store.entries())
    store.publish(asset)
    assert store.plan().damaged == ()


def test_a_name_moved_to_another_place_is_not_believed(store, asset, newer):
    first, second = store.publish(asset), store.publish(newer, tag="other")
    names = store.home / "refs"
    (names / f"{first.key}.json").write_bytes((names / f"{second.key}.json").read_bytes())
    with pytest.raises(CorruptFile, match="belongs elsewhere"):
        store.find(SENDER, RECEIVER)


@pytest.mark.parametrize("locks", [True, False])
def test_many_writers_of_one_pair_next_to_collections(store, tmp_path, monkeypatch, locks):
    """Whatever the order: the tag stands for one of the assets, whole, and nothing else is left.
    Without locks, too."""
    if not locks:
        monkeypatch.setattr(fcntl, "flock", lambda *args: None)
    made = [assets.build(tmp_path / f"a{i}", seed=i) for i in range(4)]
    digests = {store.publish(path).digest for path in made}

    def write(index: int) -> None:
        other = LocalStore(store.home)
        for turn in range(6):
            with contextlib.nullcontext() if locks else contextlib.suppress(StoreError):
                other.publish(made[(index + turn) % 4])

    def collect(_: int) -> None:
        for _ in range(12):
            LocalStore(store.home).collect()

    with ThreadPoolExecutor(6) as pool:
        list(
            pool.map(
                lambda job: job[0](job[1]),
                [(write, 0), (write, 1), (collect, 0), (write, 2), (collect, 1)],
            )
        )
    (entry,) = store.entries()
    assert entry.ref.digest in digests
    store.verify(entry.ref.digest)
    store.collect()
    assert [p.name for p in (store.home / "objects").iterdir()] == [entry.ref.digest]
    assert not list((store.home / "quarantine").iterdir())


def test_a_live_writer_is_spared_and_a_dead_one_collected(store, asset):
    store.publish(asset)
    with store._disk.stage() as stage:
        (stage / "half").write_bytes(b"half")
        assert store.plan().stages == ()
    (store.home / "tmp" / "dead").mkdir()
    (store.home / "tmp" / "dead" / "half").write_bytes(b"half")
    assert store.collect().stages == ("dead",)


def test_a_writer_that_takes_its_folder_after_the_plan_is_spared(store, asset):
    """A plan may see a folder before its writer has locked it; the collection looks again before it
    moves it."""
    store.publish(asset)
    (store.home / "tmp" / "late").mkdir()
    plan = store.plan()
    assert plan.stages == ("late",)
    handle = os.open(store.home / "tmp" / "late", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert store.collect(plan).stages == ()
    assert (store.home / "tmp" / "late").is_dir()
    os.close(handle)
    assert store.collect(plan).stages == ("late",)
    assert not list((store.home / "tmp").iterdir())


@pytest.mark.parametrize("shift_s", [-10 * 365 * 86400, 40 * 365 * 86400])
def test_the_clock_may_jump(store, asset, newer, monkeypatch, shift_s):
    real, real_ns = time.time, time.time_ns
    old = store.publish(asset)
    monkeypatch.setattr(time, "time", lambda: real() + shift_s)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + shift_s * 10**9)
    for path in store.home.rglob("*"):
        os.utime(path, (real() - shift_s, real() - shift_s))
    new = store.publish(newer)
    assert [e.ref.digest for e in store.entries()] == [new.digest]
    assert store.collect().objects == (old.digest,)
    assert store.verify(new.digest)


def test_names_that_differ_in_case_or_normalisation_only_are_apart(store, tmp_path):
    names = ["org/Receiver", "org/receiver", "org/é", "org/e\u0301", "CON", "..", "a/../../b"]
    digests = set()
    for index, name in enumerate(names):
        folder = assets.build(tmp_path / f"a{index}", SENDER, assets.geometry(name, width=6))
        digests.add(store.publish(folder).digest)
    assert {e.ref.digest for e in store.entries()} == digests
    assert len(list((store.home / "refs").iterdir())) == len(names)
    for name in names:
        assert store.select(f"org/sender..{name}").ref.label.endswith(name)


@pytest.mark.parametrize("tag", ["", "..", "a/b", "a\0b", ".hidden", "a" * 65, "ä", "a\n"])
def test_tags_are_plain(store, asset, tag):
    with pytest.raises(UsageError, match="tag"):
        store.publish(asset, tag=tag)


def test_an_ambiguous_name_is_a_usage_error(store, tmp_path):
    for commit in ("a" * 40, "b" * 40):
        receiver = assets.geometry(
            "org/receiver", width=6 if commit[0] == "a" else 8, commit=commit
        )
        store.publish(assets.build(tmp_path / commit, SENDER, receiver))
    with pytest.raises(UsageError, match="stands for 2 assets"):
        store.select("org/sender..org/receiver")
    with pytest.raises(UsageError, match="hexadecimal"):
        store.path("../../etc")


def test_reading_the_store_loads_no_torch(store, asset):
    store.publish(asset)
    code = (
        "import sys; import kvbridge.cli.commands.registry, kvbridge.registry.hub.hub; "
        f"from kvbridge.registry.store import LocalStore; s = LocalStore({str(store.home)!r}); "
        "print(len(s.entries()), s.verify(s.entries()[0].ref.digest).kind); "
        "print([m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["1 translator", "[]"]


def test_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("KVBRIDGE_HOME", raising=False)
    assert default_home() == tmp_path / "hf" / "kvbridge"
    monkeypatch.setenv("KVBRIDGE_HOME", str(tmp_path / "own"))
    assert default_home() == tmp_path / "own"


def test_an_empty_store_answers(store):
    assert store.entries() == []
    assert store.plan().objects == ()
    with pytest.raises(NotInStore, match="registry ls"):
        store.select("org/sender..org/receiver")
    assert not store.home.exists(), "reading makes nothing"


def test_policy_limits(tmp_path, asset):
    from kvbridge.registry.store.admission import AdmissionPolicy

    for policy in (AdmissionPolicy(max_weights_bytes=100), AdmissionPolicy(max_tensors=3)):
        store = LocalStore(tmp_path / "home", policy)
        with pytest.raises((Refused, CorruptFile), match="more than the"):
            store.publish(asset)
        assert store.entries() == []
