"""Real transfers through huggingface_hub against a server on the loopback."""

from __future__ import annotations

import pytest

from kvbridge.errors import CorruptFile, Refused, StoreError, TransferFailed
from kvbridge.registry.hub import Hub
from kvbridge.registry.store import LocalStore
from tests.registry import assets

REPO = "org/pair"


@pytest.fixture
def pushed(store, asset, tmp_path, hub):
    ref = store.publish(asset)
    store.attach(assets.controls(tmp_path / "controls", ref.digest))
    return ref, Hub(hub[0]).push(store, ref.digest, REPO)


def test_push_is_one_commit_and_a_tag_and_pull_gives_the_same_bytes(store, pushed, hub, tmp_path):
    ref, where = pushed
    assert sum("/commit/" in r for r in hub[1].requests) == 1
    assert hub[1].repos[REPO].names[where.tag] == where.commit
    other = LocalStore(tmp_path / "other")
    pulled = Hub(hub[0]).pull(other, REPO, revision=where.tag, expect=ref.digest)
    assert (pulled.digest, pulled.origin) == (ref.digest, f"{REPO}@{where.commit}")
    for path in store.path(ref.digest).iterdir():
        assert (other.path(ref.digest) / path.name).read_bytes() == path.read_bytes()
    controls = other.attached(ref.digest, "controls")
    assert controls is not None
    assert sorted(p.name for p in controls.iterdir()) == [
        "SHA256SUMS",
        "controls.safetensors",
        "manifest.json",
    ]
    assert not any((other.home / "downloads" / "org--pair").glob("*"))


def test_weights_over_the_lfs_path(store, asset, hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)
    hub[1].lfs = True
    ref = store.publish(asset)
    Hub(hub[0]).push(store, ref.digest, REPO)
    assert any(r.startswith("PUT /lfs/") for r in hub[1].requests)
    assert Hub(hub[0]).pull(LocalStore(tmp_path / "other"), REPO).digest == ref.digest


def test_pushing_the_same_again_changes_nothing(store, pushed, hub):
    ref, where = pushed
    again = Hub(hub[0]).push(store, ref.digest, REPO)
    assert hub[1].repos[REPO].commits[again.commit] == hub[1].repos[REPO].commits[where.commit]


def test_a_pinned_revision_outlives_a_newer_push(store, pushed, hub, newer, tmp_path):
    ref, where = pushed
    second = store.publish(newer)
    newest = Hub(hub[0]).push(store, second.digest, REPO)
    files = hub[1].repos[REPO].commits[newest.commit]
    assert not any(name.startswith("controls/") for name in files), "bound to the older translator"
    other = LocalStore(tmp_path / "other")
    assert Hub(hub[0]).pull(other, REPO, revision=where.commit).digest == ref.digest
    assert Hub(hub[0]).pull(other, REPO).digest == second.digest
    with pytest.raises(Refused, match="expected"):
        Hub(hub[0]).pull(other, REPO, expect=ref.digest)


def test_a_tag_is_never_moved(store, pushed, hub, newer):
    second = store.publish(newer)
    with pytest.raises(TransferFailed, match="choose another"):
        Hub(hub[0]).push(store, second.digest, REPO, tag=pushed[1].tag)


def test_a_commit_that_came_between_is_not_overwritten(store, pushed, hub, newer, monkeypatch):
    second = store.publish(newer)
    client = Hub(hub[0])
    real = client._api.model_info

    def stale(*args, **options):
        info = real(*args, **options)
        if not options.get("revision"):
            info.sha = "0" * 40
        return info

    monkeypatch.setattr(client._api, "model_info", stale)
    before = hub[1].repos[REPO].names["main"]
    with pytest.raises(TransferFailed):
        client.push(store, second.digest, REPO)
    assert hub[1].repos[REPO].names["main"] == before


def test_the_card_names_models_commits_and_licences(pushed, hub):
    card = hub[1].repos[REPO].commits[pushed[1].commit]["README.md"].decode()
    assert "library_name: kvbridge" in card
    for part in ("org/sender", "org/receiver", "apache-2.0", "V R²"):
        assert part in card


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "manifest.json", "SHA256SUMS", "README.md"]
)
def test_what_was_altered_on_the_way_is_refused(pushed, hub, tmp_path, name):
    data = bytearray(hub[1].repos[REPO].commits[pushed[1].commit][name])
    data[len(data) // 2] ^= 1
    hub[1].rewrite[name] = bytes(data)
    other = LocalStore(tmp_path / "other")
    with pytest.raises((CorruptFile, Refused)):
        Hub(hub[0]).pull(other, REPO)
    assert other.entries() == []


def test_a_broken_download_goes_on_and_nothing_partial_is_published(pushed, hub, tmp_path):
    hub[1].cut = 100
    other = LocalStore(tmp_path / "other")
    try:
        Hub(hub[0]).pull(other, REPO)
    except StoreError:
        assert other.entries() == []
        Hub(hub[0]).pull(other, REPO)
    assert other.verify(pushed[0].digest).digest == pushed[0].digest


@pytest.mark.parametrize(
    "name", ["../../evil", "weights.pkl", "controls/../x/y", "pytorch_model.bin", "a\0b"]
)
def test_other_files_of_a_repository_are_not_even_fetched(pushed, hub, tmp_path, name):
    repo = hub[1].repos[REPO]
    repo.commits[repo.names["main"]][name] = b"payload"
    other = LocalStore(tmp_path / "other")
    assert Hub(hub[0]).pull(other, REPO).digest == pushed[0].digest
    assert not [
        r
        for r in hub[1].requests
        if r.startswith("GET") and ("evil" in r or ".pkl" in r or ".bin" in r)
    ]
    assert not list(tmp_path.rglob("evil"))


def test_offline_mode_is_said_clearly(store, asset, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ref = store.publish(asset)
    for action in (
        lambda: Hub("http://127.0.0.1:1").push(store, ref.digest, REPO),
        lambda: Hub().pull(store, REPO),
    ):
        with pytest.raises(TransferFailed, match="HF_HUB_OFFLINE"):
            action()


def test_no_such_repository_no_such_revision_no_such_server(store, pushed, hub):
    with pytest.raises(TransferFailed, match="no such repository or revision"):
        Hub(hub[0]).pull(store, "org/none")
    with pytest.raises(TransferFailed, match="no such repository or revision"):
        Hub(hub[0]).pull(store, REPO, revision="nothing")


def test_an_incomplete_repository_is_refused_before_a_download(pushed, hub, tmp_path):
    repo = hub[1].repos[REPO]
    del repo.commits[repo.names["main"]]["SHA256SUMS"]
    with pytest.raises(Refused, match="SHA256SUMS is missing"):
        Hub(hub[0]).pull(LocalStore(tmp_path / "other"), REPO)
