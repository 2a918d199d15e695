"""`kvbridge registry` from the command line: tables, JSON, exit codes, one line for every
refusal."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvbridge.cli.commands.registry import registry_app
from tests.registry import assets

PAIR = "org/sender..org/receiver"


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBRIDGE_HOME", str(tmp_path / "home"))

    def call(*words, code=0):
        done = CliRunner().invoke(registry_app, [str(w) for w in words])
        assert done.exit_code == code, done.output
        if code:
            assert len(done.stderr.strip().splitlines()) == 1 or code == 2
        return json.loads(done.stdout) if "--json" in words and not code else done.output

    return call


@pytest.fixture
def fitted(tmp_path):
    """As `kvbridge fit --out` leaves it: an asset, and its control set beside it."""
    from kvbridge.files import folder_digest

    commits = {"commit": "a" * 40}, {"commit": "b" * 40}
    sender = assets.geometry("org/sender", **commits[0])
    receiver = assets.geometry("org/receiver", width=6, **commits[1])
    folder = assets.build(tmp_path / "fitted", sender, receiver)
    assets.controls(tmp_path / "fitted.controls", folder_digest(assets.files(sender, receiver)))
    return folder


def test_the_life_of_an_asset(run, fitted):
    assert "nothing here yet" in run("ls")
    added = run("add", fitted, "--json")
    assert (added["kind"], added["tag"]) == ("translator", "main")
    table = run("ls")
    assert PAIR in table
    assert "controls" in table
    entries = run("ls", "--json")["entries"]
    assert [e["ref"]["kind"] for e in entries] == ["translator", "controls"]
    shown = run("show", PAIR, "--json")
    assert shown["path"] == added["path"]
    assert shown["mapper_id"] == f"sender-receiver-full_head-fp32-tp1-h2-s{'a' * 40}-t{'b' * 40}-b1"
    assert shown["record"]["receiver"]["licence"] == "apache-2.0"
    text = run("show", added["digest"][:8])
    for part in ("apache-2.0", "a" * 40, "attached", "v_r2"):
        assert part in text
    assert run("verify").count("ok ") == 2
    run("add", fitted, "--tag", "kept")
    assert len(run("rm", PAIR, "--json")["removed"]) == 1
    assert run("gc", "--json")["objects"] == []
    run("rm", added["digest"])
    assert "would delete 2 object(s)" in run("gc", "--dry-run")
    assert len(run("gc", "--json")["objects"]) == 2
    assert run("rebuild", "--json") == {"objects": 0}


def test_what_stands_beside_an_asset_goes_with_it(run, tmp_path):
    from kvbridge.files import folder_digest

    folder, digest = assets.build(tmp_path / "fitted"), folder_digest(assets.files())
    assets.controls(tmp_path / "fitted.controls", digest)
    assets.calibration(tmp_path / "fitted.gate", digest)
    run("add", folder)
    kinds = [e["ref"]["kind"] for e in run("ls", "--json")["entries"]]
    assert kinds == ["translator", "calibration", "controls"]


def test_exit_codes_and_one_line(run, fitted, tmp_path):
    assert "registry ls" in run("show", "org/none..org/none", code=1)
    assert "expected the folder of an asset" in run("add", tmp_path / "none", code=1)
    run("add", fitted, "--tag", "../x", code=2)
    run("push", code=2)
    run("nonsense", code=2)
    digest = run("add", fitted, "--json")["digest"]
    weights = tmp_path / "home" / "objects" / digest / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "1 of 2 failed" in run("verify", code=1)
    assert "missing" in run("ls")
    assert "publish or pull" in run("show", PAIR, code=1)


def test_push_and_pull(run, fitted, hub, tmp_path):
    digest = run("add", fitted, "--json")["digest"]
    pushed = run("push", PAIR, "org/pair", "--endpoint", hub[0], "--json")
    assert pushed["digest"] == digest
    where = ("--endpoint", hub[0], "--home", tmp_path / "other")
    pulled = run("pull", f"org/pair@{pushed['commit']}", *where, "--digest", digest, "--json")
    assert pulled["origin"] == f"org/pair@{pushed['commit']}"
    assert run("verify", "--home", tmp_path / "other").count("ok ") == 2
    run("pull", "org/pair@nothing", *where, code=1)
    run("pull", "org/pair", *where, "--digest", "0" * 64, code=1)


def test_a_pull_tells_its_bytes_and_the_client_draws_nothing(run, fitted, hub, tmp_path, capsys):
    from kvbridge.registry.hub import Hub
    from kvbridge.registry.store import LocalStore

    run("add", fitted)
    run("push", PAIR, "org/pair", "--endpoint", hub[0])
    fetched, admitted = [], []
    store = LocalStore(tmp_path / "other")
    Hub(hub[0]).pull(
        store,
        "org/pair",
        fetching=lambda done, total: fetched.append((done, total)),
        progress=lambda done, total: admitted.append((done, total)),
    )
    for told in (fetched, admitted):
        assert told == sorted(told)
        assert told[-1][0] == told[-1][1] > 0
    assert capsys.readouterr().err == ""


def test_offline(run, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in run("pull", "org/pair", code=1)


def test_names_from_assets_cannot_reach_the_terminal(run, fitted, tmp_path):
    from kvbridge.registry.store.naming import clean

    assert clean("a\x1b[2Jb\nc\u202e") == "a [2Jb c "
    run(
        "add",
        assets.build(tmp_path / "m", assets.geometry("org/[red]x[/red]"), assets.geometry("org/r")),
    )
    assert "org/[red]x[/red]..org/r@main" in run("ls")


def test_a_policy_file(run, fitted, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "policy.json").write_text('{"max_weights_bytes": 100}')
    assert "more than the 100 allowed" in run("add", fitted, code=1)
    (home / "policy.json").write_text('{"require_signature": true, "public_keys": []}')
    assert "asks for a signature" in run("add", fitted, code=1)
    (home / "policy.json").write_text('{"typo": 1}')
    assert "expected require_signature" in run("ls", code=2)
