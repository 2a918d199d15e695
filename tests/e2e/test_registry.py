"""What docs/registry.md shows is run: fit, calibrate, push, pull in another home, verify,
handoff."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_cli import few, kvbridge
from tests.registry import hub_server

DOC = Path(__file__).parents[2] / "docs" / "registry.md"


def block(language: str) -> str:
    """The first block of that language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", DOC.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return next(text for name, text in blocks if name == language)


def small(commands: str) -> str:
    """The documented commands on a tenth of the data."""
    changed = commands.replace("--max-tokens 64", "--max-tokens 64 --layers 2 --data data").replace(
        "limit 60", "limit 24"
    )
    assert changed.count("--data data") == 1
    assert changed.count("--limit 24") == 1
    return changed


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """The folder in which the documented commands ran, what they printed, the Hub they used and its
    address."""
    folder = tmp_path_factory.mktemp("walk")
    few(folder / "data", documents=40)
    (folder / "handoff.py").write_text(block("python"), "utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with hub_server.serve() as (address, state):
        environment |= {
            "HF_ENDPOINT": address,
            "HF_TOKEN": "hf_loopback",
            "OMP_NUM_THREADS": "1",
            "PATH": path,
        }
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", small(block("sh"))],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        yield folder, done.stdout, state, address


def test_the_documented_commands_end_in_a_handoff(walked):
    _, printed, state, _ = walked
    *_, decided, text = printed.strip().splitlines()
    assert re.fullmatch(r"use_approximate approximate (\d+) of \d+ tokens", decided)
    assert len(text) > len("Tom walked to the harbour. The ferry was late, so Tom sat down and")
    assert len(re.findall(r"^ok ", printed, re.MULTILINE)) == 3
    assert sum("/commit/" in request for request in state.requests) == 1


def test_the_shown_output_has_the_form_of_the_real_one(walked):
    """Digests, sizes, scores and texts differ from fit to fit; everything else must not."""

    def form(text: str) -> list[str]:
        plain = re.sub(r"[0-9a-f]{12,}", "DIGEST", text[text.index("added ") :])
        lines = [" ".join(line.split()) for line in plain.strip().splitlines()[:-1]]
        return [re.sub(r"\d+\.\d+( k?[MB]+B?)?|\d+ of \d+", "N", line) for line in lines]

    assert form(block("")) == form(walked[1])


def test_control_set_and_calibration_travel_and_load(walked):
    from kvbridge.asset.folder import load_asset, load_controls
    from kvbridge.gates.decide.calibration import load_calibration
    from kvbridge.registry.store import LocalStore

    folder, _, state, _ = walked
    here, there = LocalStore(folder / "here"), LocalStore(folder / "there")
    digest = here.select("demo:sender..demo:receiver").ref.digest
    asset = load_asset(there.path(digest))
    for kind, load in (("controls", load_controls), ("calibration", load_calibration)):
        path = there.attached(digest, kind)
        assert path is not None
        assert path.name == here.attached(digest, kind).name
        arguments = (asset, path) if kind == "controls" else (path, asset)
        assert load(*arguments) is not None
    files = state.repos["org/pair"].commits[state.repos["org/pair"].names["main"]]
    card = files["README.md"].decode()
    assert "base_model" not in card, "the demo's models are not on the Hub"
    assert "`demo:sender`" in card
    manifest = json.loads(files["manifest.json"])
    assert set(manifest["scores"]["token_only"]) == {"k_r2", "v_r2"}
    assert f"{manifest['scores']['token_only']['v_r2'][1]:.3f}" in card


def test_an_evaluation_of_the_asset_goes_onto_the_repository_s_card(walked):
    folder, _, state, address = walked
    kvbridge(
        "eval", "run", folder / "asset", "--out", folder / "run", "--limit", 6, "--tasks", "recall"
    )
    words = (
        "push",
        "demo:sender..demo:receiver",
        "org/pair",
        "--summary",
        folder / "run" / "summary.json",
    )
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {
        "HF_ENDPOINT": address,
        "HF_TOKEN": "hf_loopback",
        "KVBRIDGE_HOME": str(folder / "here"),
    }
    command = [sys.executable, "-m", "kvbridge.cli.main", "registry", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    card = (
        state.repos["org/pair"].commits[state.repos["org/pair"].names["main"]]["README.md"].decode()
    )
    for name in ("native", "sender", "translated", "token_only", "wrong_document"):
        assert f"| `{name}` | 6 |" in card
