"""Stores, assets and a Hub for the registry's tests."""

from __future__ import annotations

import pytest

from kvbridge.registry.store import LocalStore
from tests.registry import assets, hub_server


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "home")


@pytest.fixture
def asset(tmp_path):
    return assets.build(tmp_path / "asset")


@pytest.fixture
def newer(tmp_path):
    """Another fit of the same pair."""
    return assets.build(tmp_path / "newer", seed=1)


@pytest.fixture
def hub(monkeypatch):
    """Address and state of a Hub on the loopback, with the client switched online."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_loopback")
    with hub_server.serve() as served:
        yield served
