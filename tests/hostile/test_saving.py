"""Saving: the same again changes nothing, other content is never overwritten."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import kvbridge
from kvbridge.errors import AlreadyExists
from kvbridge.format import CONTROL_SET
from tests.hostile.forge import (
    CARD,
    made_fit,
    saved,
)


def content_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_saving_the_same_content_again_changes_nothing(asset):
    before, inode = content_of(asset), asset.stat().st_ino
    assert kvbridge.save_asset(made_fit(), asset) == kvbridge.load_asset(asset).digest
    assert content_of(asset) == before
    assert asset.stat().st_ino == inode
    assert [p.name for p in sorted(asset.parent.iterdir())] == ["asset", "asset.controls"]


@pytest.mark.parametrize(
    "prepare",
    [
        "other asset",
        "damaged",
        "foreign folder",
        "file",
        "link to a file",
        "dangling link",
        "link to an asset",
    ],
)
def test_other_content_is_never_overwritten(tmp_path, prepare):
    path, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    if prepare == "other asset":
        saved(path, seed=1)
        shutil.rmtree(CONTROL_SET.beside(path))
    elif prepare == "damaged":
        saved(path)
        (path / CARD).write_text("changed")
    elif prepare == "foreign folder":
        path.mkdir()
        (path / "thesis.txt").write_text("the only copy")
    elif prepare == "file":
        path.write_text("the only copy")
    elif prepare == "link to a file":
        elsewhere.write_text("the only copy")
        path.symlink_to(elsewhere)
    elif prepare == "dangling link":
        path.symlink_to(elsewhere)
    else:
        path.symlink_to(saved(elsewhere, seed=1))
    before = {
        str(p.relative_to(tmp_path)): p.read_bytes()
        for p in sorted(tmp_path.rglob("*"))
        if p.is_file()
    }
    with pytest.raises(AlreadyExists):
        kvbridge.save_asset(made_fit(), path)
    after = {
        str(p.relative_to(tmp_path)): p.read_bytes()
        for p in sorted(tmp_path.rglob("*"))
        if p.is_file()
    }
    assert after == before


def test_foreign_content_where_the_controls_belong_leaves_no_half_saved_asset(tmp_path):
    path = tmp_path / "asset"
    CONTROL_SET.beside(path).mkdir()
    (CONTROL_SET.beside(path) / "notes.txt").write_text("mine")
    with pytest.raises(AlreadyExists):
        kvbridge.save_asset(made_fit(), path)
    assert not path.exists()
    assert content_of(CONTROL_SET.beside(path)) == {"notes.txt": b"mine"}
