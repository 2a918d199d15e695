"""Licences of base models: from a folder's card, and from the Hub at the commit that was
resolved."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvbridge import demo
from kvbridge.model.licence import licence_of
from tests.registry import hub_server


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("---\nlicense: mit\n---\n", "mit"),
        ("---\nlicense: other\nlicense_name: gemma\n---\n", "gemma"),
        ("---\nlicense: other\n---\n", "other"),
        ("---\nlicense:\n- mit\n---\n", None),
        ("# A model\n", None),
    ],
)
def test_the_card_of_a_folder(tmp_path, card, expected):
    (tmp_path / "README.md").write_text(card)
    assert licence_of(tmp_path, "") == expected


def test_no_card(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert licence_of(None, "") is None
    assert licence_of(tmp_path, "") is None
    assert licence_of(tmp_path / "org" / "name", "a" * 40) is None


LOAD = """
import json, sys, kvbridge
from kvbridge.asset.card import hub_id
for source in sys.argv[1:]:
    g = kvbridge.load(source).geometry
    print(json.dumps([g.model_id, g.commit, g.licence, hub_id(g)]))
"""


def test_a_branch_is_resolved_and_the_licence_is_that_of_the_commit(tmp_path):
    """From a Hub, by branch and by commit: the geometry holds the full commit, and the card's
    licence at it."""
    files = {
        p.name: p.read_bytes()
        for p in demo.path("receiver").iterdir()
        if p.is_file() and p.name[0] != "."
    }
    first, second = "a" * 40, "b" * 40
    with hub_server.serve() as (address, state):
        repo = state.repos["org/small"] = hub_server.Repo()
        repo.commits[first] = {**files, "README.md": b"---\nlicense: mit\n---\n"}
        repo.commits[second] = {**files, "README.md": b"---\nlicense: bsd\n---\n"}
        repo.names = {"main": second}
        environment = {
            name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"
        }
        environment |= {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", LOAD, "org/small", f"org/small@{first}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers == [
        ["org/small", second, "bsd", "org/small"],
        ["org/small", first, "mit", "org/small"],
    ]
