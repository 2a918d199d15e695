"""Control sets that are not this translator's, or read what a control must not."""

from __future__ import annotations

import shutil

import pytest

import kvbridge
from kvbridge.errors import CorruptFile, FileError, UnknownSchema
from kvbridge.format import CONTROL_SET
from tests.hostile.forge import (
    CONTROLS,
    WEIGHTS,
    drop,
    forge_manifest,
    reseal,
    saved,
    set_at,
)


def test_controls_that_are_not_this_translators(asset, tmp_path):
    loaded = kvbridge.load_asset(asset)
    own, other = CONTROL_SET.beside(asset), CONTROL_SET.beside(saved(tmp_path / "other", seed=1))
    assert kvbridge.load_controls(loaded).sender_layers == ()

    def refuse(folder, kind=CorruptFile):
        with pytest.raises(FileError) as refusal:
            kvbridge.load_controls(loaded, folder)
        assert type(refusal.value) is kind

    refuse(other)
    refuse(asset)
    refuse(tmp_path / "missing")
    shutil.copy(other / CONTROLS, own / CONTROLS)
    reseal(own)
    refuse(own)


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (set_at("schema", value="kvbridge.controls/2"), UnknownSchema),
        (set_at("schema", value="kvbridge.translator/1"), UnknownSchema),
        (drop("schema"), UnknownSchema),
        (lambda body: [body], UnknownSchema),
        (set_at("translator", value="0" * 64), CorruptFile),
        (drop("translator"), CorruptFile),
        (set_at("extra", value=1), CorruptFile),
        (set_at("receiver_features", value="none"), CorruptFile),
        (set_at("receiver_features", value="hidden:9"), CorruptFile),
        (set_at("receiver_features", value=3), CorruptFile),
        (set_at("maps", value=None), CorruptFile),
        (drop("maps", -1), CorruptFile),
        (set_at("maps", 0, "layer", value=7), CorruptFile),
        (set_at("maps", 0, "groups", 0, "features", value=False), CorruptFile),
    ],
)
def test_hostile_controls(asset, what, kind):
    loaded = kvbridge.load_asset(asset)
    forge_manifest(CONTROL_SET.beside(asset), what)
    with pytest.raises(FileError) as refusal:
        kvbridge.load_controls(loaded)
    assert type(refusal.value) is kind


def test_controls_that_read_the_sender_are_refused(asset):
    """A control with a sender block would make the token-only floor as high as the translation
    itself."""
    loaded = kvbridge.load_asset(asset)
    folder = CONTROL_SET.beside(asset)
    shutil.copy(asset / WEIGHTS, folder / CONTROLS)
    forge_manifest(folder, set_at("maps", value=loaded.manifest.body["maps"]))
    with pytest.raises(CorruptFile, match="sender"):
        kvbridge.load_controls(loaded)
