"""Fixtures that several packages' tests share; builders are in tests/models.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.models import TEXT, tiny


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tests share few cores, and one thread makes CPU sums reproducible."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text() -> str:
    return TEXT


@pytest.fixture(scope="session")
def llama():
    """A tiny Llama with grouped-query attention, shared: do not modify it."""
    return tiny("llama")
