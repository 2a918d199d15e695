"""Damaged and foreign asset folders: each is refused as a FileError, none loads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import kvbridge
from kvbridge.format import SUMS
from tests.hostile.forge import (
    CARD,
    MANIFEST,
    WEIGHTS,
    binding_of,
    drop,
    forge_manifest,
    join_weights,
    refused,
    reseal,
    resize,
    saved,
    set_at,
    sound_copy,
    split_weights,
)

FILES = (MANIFEST, WEIGHTS, CARD, SUMS)


def test_forging_nothing_still_loads(asset):
    manifest = sound_copy(asset)
    assert manifest.weights_bytes == (asset / WEIGHTS).stat().st_size


def test_the_binding_is_what_the_manifest_says(asset):
    loaded = kvbridge.load_asset(asset)
    assert loaded.manifest.binding == binding_of(loaded.manifest.body)
    assert split_weights(asset / WEIGHTS)[0]["__metadata__"] == {
        "kvbridge": loaded.manifest.binding
    }


@pytest.mark.parametrize("name", FILES)
def test_truncated(asset, name):
    data = (asset / name).read_bytes()
    for length in (0, 1, 7, 8, 9, len(data) // 2, len(data) - 1):
        (asset / name).write_bytes(data[:length])
        refused(asset)
        if name != SUMS:
            reseal(asset)
            if name != CARD and (name, length) != (MANIFEST, len(data) - 1):
                refused(asset)
        (asset / name).write_bytes(data)
        reseal(asset)
    kvbridge.load_asset(asset)


@pytest.mark.parametrize("name", FILES)
def test_one_bit_flipped_anywhere(asset, name):
    data = (asset / name).read_bytes()
    for offset in sorted({*range(0, len(data), max(1, len(data) // 40)), 0, 7, 8, len(data) - 1}):
        for bit in (0, 5):
            flipped = bytearray(data)
            flipped[offset] ^= 1 << bit
            (asset / name).write_bytes(flipped)
            refused(asset)
    (asset / name).write_bytes(data)
    kvbridge.load_asset(asset)


@pytest.mark.parametrize("name", FILES)
def test_missing_linked_or_special_files(asset, name, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (asset / name).rename(elsewhere)
    refused(asset)
    (asset / name).symlink_to(elsewhere)
    refused(asset)
    (asset / name).unlink()
    (asset / name).mkdir()
    refused(asset)
    (asset / name).rmdir()
    os.mkfifo(asset / name)
    refused(asset)
    (asset / name).unlink()
    (asset / name).symlink_to("/dev/zero")
    refused(asset)


def test_folders_that_are_none(tmp_path, asset):
    for path in (tmp_path / "missing", asset / MANIFEST, tmp_path / "a\0b", Path("x" * 5000)):
        refused(path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path / "loop")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty")


@pytest.mark.parametrize(
    "name", ["evil.py", ".hidden", "weights.safetensors.bak", "model.pt", "Manifest.json"]
)
@pytest.mark.parametrize("listed", [False, True])
def test_extra_files_listed_or_not(asset, name, listed):
    (asset / name).write_bytes(b"anything")
    if listed:
        reseal(asset)
    refused(asset)


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/etc/passwd",
        "sub/manifest.json",
        "..",
        ".",
        "",
        "a\0b",
        "manifest.json\0",
        "MANIFEST.json",
        "man\u0131fest.json",
        "manifest.json\u200b",
        "nul\\name",
        "-rf",
        "a" * 300,
        SUMS,
        "manifest.json ",
        "\tmanifest.json",
    ],
)
def test_paths_and_look_alikes_in_the_list_of_sums(asset, name):
    sums = (asset / SUMS).read_text()
    digest = sums[:64]
    (asset / SUMS).write_text(f"{sums}{digest}  {name}\n", "utf-8")
    refused(asset)
    (asset / SUMS).write_text(sums.replace("manifest.json", name), "utf-8")
    refused(asset)


def test_malformed_lists_of_sums(asset):
    good = (asset / SUMS).read_text()
    first = good.splitlines()[0]
    for bad in (
        good + first + "\n",
        good.upper(),
        good.replace("  ", " "),
        good.replace("  ", " *"),
        good + "\n",
        "\n" + good,
        good.replace("\n", "\r\n"),
        good.replace("\n", "\x0b"),
        good + "# comment\n",
        "\ufeff" + good,
        good * 2000,
        "",
    ):
        (asset / SUMS).write_bytes(bad.encode())
        refused(asset)
    (asset / SUMS).write_bytes(b"\xff" * 100)
    refused(asset)


def test_swapped_direction(asset):
    def swap(body):
        body["sender"], body["receiver"] = body["receiver"], body["sender"]

    forge_manifest(asset, swap, bind=False)
    refused(asset)


def test_weights_of_another_pair_or_another_fit(asset, tmp_path):
    other = saved(tmp_path / "other", seed=1)
    shutil.copy(other / WEIGHTS, asset / WEIGHTS)
    resize(asset)
    assert "not of this manifest" in refused(asset)


def test_manifest_of_another_fit_of_the_same_pair(asset):
    forge_manifest(asset, lambda body: body.update(corpus_digest="0" * 64), bind=False)
    assert "not of this manifest" in refused(asset)


def code_ran(marker: Path) -> None:
    marker.touch()


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (code_ran, (self.marker,))


@pytest.mark.parametrize("name", [WEIGHTS, MANIFEST, CARD])
@pytest.mark.parametrize("legacy", [False, True])
def test_pickle_in_disguise_runs_nothing(asset, tmp_path, name, legacy):
    marker = tmp_path / "ran"
    torch.save(
        {"target.0.k.W": Bomb(marker)}, asset / name, _use_new_zipfile_serialization=not legacy
    )
    if name == WEIGHTS:
        resize(asset)
    else:
        reseal(asset)
    if name == CARD:
        kvbridge.load_asset(asset)
    else:
        refused(asset)
    assert not marker.exists()
    torch.load(saved_bomb(tmp_path, marker), weights_only=False)
    assert marker.exists(), "the disguised file must be able to harm"


def saved_bomb(folder: Path, marker: Path) -> Path:
    path = folder / "bomb.pt"
    torch.save(Bomb(marker), path)
    return path


def test_head_local_assets_and_their_groups(tmp_path):
    folder = saved(tmp_path / "asset", family="head-local")
    sound_copy(folder)
    for change in (
        drop("maps", 0, "groups", -1),
        drop("maps", 0, "groups", 0),
        set_at("maps", 0, "groups", 1, "heads", value=[0]),
        set_at("maps", 0, "groups", 1, "heads", value=[1, 1]),
        set_at("maps", 0, "groups", 1, "blocks", 0, 2, value=[0, 1]),
        set_at("maps", 0, "groups", 1, "blocks", 0, 2, value=[]),
        set_at("maps", 0, "groups", 1, "blocks", 0, 2, value=[0, 0]),
    ):
        copy_ = tmp_path / "copy"
        shutil.copytree(folder, copy_)
        forge_manifest(copy_, change)
        refused(copy_)
        shutil.rmtree(copy_)


def test_join_and_split_are_inverse(asset):
    before = (asset / WEIGHTS).read_bytes()
    join_weights(
        asset / WEIGHTS,
        before[8 : 8 + int.from_bytes(before[:8], "little")],
        split_weights(asset / WEIGHTS)[1],
    )
    assert (asset / WEIGHTS).read_bytes() == before
