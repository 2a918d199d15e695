"""`kvbridge gate` as a user runs it: exit codes, one-line refusals, and what it prints."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from kvbridge.cli.main import main
from kvbridge.errors import DataError
from kvbridge.gates.decide.calibration import save_calibration
from kvbridge.gates.decide.guarantee import Tested as Passed
from kvbridge.gates.decide.score import Score
from kvbridge.gates.decide.sealed import Rung
from kvbridge.gates.labels import LABELS
from kvbridge.gates.signals import DEFAULT_SIGNALS, SIGNALS
from tests.gates.conftest import PLAN, made_calibration

LENGTH = Score(("length",), (0.0,), (1.0,), (0.0,), 0.0)

SEEN = {"coverage": 0.5, "accepted": 10, "damaged": 1, "risk_ci": [0.01, 0.4]}
REPORT = {
    "items": 20,
    "damaged": 6,
    "strict": None,
    "lenient": SEEN,
    "approximate": {**SEEN, "accepted": 8, "damaged": 3},
}


@pytest.fixture
def kvbridge(monkeypatch, capsys):
    """Runs a command as `kvbridge` does, in this process; returns what it printed on stdout and
    stderr."""

    def run(*arguments, code=0, columns=200):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["kvbridge", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert (ended.value.code or 0) == code, printed.err
        return printed.out, printed.err

    return run


@pytest.fixture
def calibrated(pair, tmp_path):
    folder = tmp_path / "asset.gate"
    save_calibration(made_calibration(pair, report=REPORT), folder)
    return pair.asset.path, folder


def test_show(kvbridge, calibrated):
    asset, folder = calibrated
    body = json.loads(kvbridge("gate", "show", asset, "--calibration", folder, "--json")[0])
    assert body["usable"]
    assert body["needed"] == 149
    assert body["gate_share_2048"] > 0
    shown = kvbridge("gate", "show", asset, "--calibration", folder)[0]
    assert body["levels"]["use_approximate"]["threshold"] == 0.6
    assert body["levels"]["use"]["threshold"] is None
    assert body["levels"]["use_approximate"]["failures_when_set"] == 1
    assert body["levels"]["use_approximate"]["alone"]["tagged"] == 8
    assert set(body["signal_table"]) == set(body["signals"])
    assert any("translator" in reason for reason in body["expires_with"])
    for word in (
        "repair plans: sinks 2, tail 11",
        "score 10, thresholds 400",
        "1 of 400",
        "use_approximate",
        "none holds",
        "all accepted: use and use_approximate together",
        "score 10, thresholds 400, report 20 (6 damaged, 30%)",
        "30% damaged without a gate",
        "(20 requests, 6 damaged)",
        "below 0.5 means that high values go with less damage",
        "tagged use_approximate, on the report part: 3 of 8 damaged",
        "nothing is promised of these alone",
        "expires with",
        "sender_first",
        "of a prefill of 2048 tokens",
    ):
        assert word in " ".join(shown.split())
    assert body["damage"] == {"part": "report", "requests": 20, "damaged": 6, "share": 0.3}


def test_nothing_is_cut_at_eighty_columns(kvbridge, pair, tmp_path):
    passed = Passed(0.123456, 1234, 123, 0.01)
    auroc = {c: 0.5 for s in SIGNALS.values() for c in s.columns}
    report = {
        **REPORT,
        "lenient": {**SEEN, "risk_ci": [0.1234, 0.4321]},
        "strict": SEEN,
        "auroc": auroc,
    }
    save_calibration(
        made_calibration(pair, strict=passed, lenient=passed, report=report), tmp_path / "gate"
    )
    shown = kvbridge(
        "gate", "show", pair.asset.path, "--calibration", tmp_path / "gate", columns=80
    )[0]
    tables = [line for line in shown.splitlines() if "digest" not in line]
    assert not [line for line in tables if "…" in line]
    for word in (
        "all accepted",
        "123 of 1234",
        "12.3% to 43.2%",
        "coverage",
        "sender_early",
        *auroc,
    ):
        assert word in shown


def test_a_calibration_that_holds_nothing_says_how_common_damage_is(kvbridge, pair, tmp_path):
    for name, report, said in (
        ("new", REPORT, True),
        ("old", {"items": 20}, False),
        ("none", {"items": 0}, False),
    ):
        save_calibration(
            made_calibration(pair, strict=None, lenient=None, report=report), tmp_path / name
        )
        shown = kvbridge("gate", "show", pair.asset.path, "--calibration", tmp_path / name)[0]
        assert ("damage is 30% of the report part (6 of 20)" in shown) == said
        assert "takes 149 accepted ones without a failure" in shown
        body = json.loads(
            kvbridge("gate", "show", pair.asset.path, "--calibration", tmp_path / name, "--json")[0]
        )
        assert (body["damage"] is None) == (not said)
        assert ("of the report part" in body["refusal"]) == said


def test_refusals_are_one_line(kvbridge, calibrated, tmp_path):
    asset, folder = calibrated
    (folder / "calibration.json").write_text("{}")
    for arguments, code in (
        (("gate", "show", asset, "--calibration", folder), 1),
        (("gate", "show", asset, "--calibration", tmp_path / "nowhere"), 2),
        (("gate", "calibrate", asset, "--out", tmp_path / "new", "--alpha", "2"), 2),
        (("gate", "calibrate", asset, "--out", folder), 2),
        (("gate", "calibrate", asset, "--out", tmp_path / "new", "--signals", "length,psychic"), 2),
    ):
        _, stderr = kvbridge(*arguments, code=code)
        assert stderr.startswith("kvbridge: ")
        assert len(stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "named", "near"),
    [
        (("--signals", "length,tail_los"), "tail_los", "tail_loss"),
        (("--signals", "psychic"), "psychic", None),
        (("--label", "next_tokens"), "next_tokens", "next_token"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest(kvbridge, pair, tmp_path, given, named, near):
    _, stderr = kvbridge(
        "gate", "calibrate", pair.asset.path, "--out", tmp_path / "new", *given, code=2
    )
    known = SIGNALS if given[0] == "--signals" else LABELS
    words = " ".join(stderr.split())
    assert f"of {', '.join(known)}, found {named}" in words
    assert words.endswith(f"found {named}; did you mean {near}?" if near else f"found {named}")


def test_a_signal_given_twice_is_said_to_be(kvbridge, pair, tmp_path):
    given = ("--signals", "length,length")
    _, stderr = kvbridge(
        "gate", "calibrate", pair.asset.path, "--out", tmp_path / "new", *given, code=2
    )
    assert "expected each signal once, found length, length" in stderr


def test_time(kvbridge, calibrated, tmp_path, monkeypatch, pair):
    monkeypatch.setattr("kvbridge.cli.calibrate.models_of", lambda *_: [pair.sender, pair.receiver])
    asset, folder = calibrated
    texts = tmp_path / "texts.txt"
    texts.write_text("\n\n".join(pair.texts))
    common = (
        "gate",
        "time",
        asset,
        "--calibration",
        folder,
        "--data",
        texts,
        "--tokens",
        200,
        "--repeats",
        1,
    )
    body = json.loads(kvbridge(*common, "--json", "--out", tmp_path / "speed.json")[0])
    speed = json.loads((tmp_path / "speed.json").read_text())
    assert speed == body["flops_per_ms"]
    assert body["gate_share"] == pytest.approx(body["gate_ms"] / body["prefill_ms"])
    assert body["tokens"] == 200
    shown = kvbridge(*common)[0]
    assert "all signals: " in shown
    assert "default signals alone: " in shown
    assert "budget" not in shown, "it is defined at 2,048 tokens"
    monkeypatch.setattr("kvbridge.cli.gate_show.TOKENS", 200)
    assert "of a budget of 2%" in kvbridge(*common)[0]
    save_calibration(
        made_calibration(pair, signals=("length", "next_token"), rungs=(Rung(PLAN, LENGTH, {}),)),
        tmp_path / "few",
    )
    shown = kvbridge(*common[:4], tmp_path / "few", *common[5:])[0]
    assert (
        "default signals without "
        f"{', '.join(n for n in DEFAULT_SIGNALS if n not in ('length', 'next_token'))} (not in"
        in shown
    )


@pytest.mark.parametrize(
    ("given", "signals"),
    [
        ((), DEFAULT_SIGNALS),
        (("--signals", "all"), tuple(SIGNALS)),
        (("--signals", "length,sender_tail"), ("length", "sender_tail")),
    ],
)
def test_which_signals_are_calibrated(kvbridge, pair, tmp_path, monkeypatch, given, signals):
    asked = []

    def refuse(bridge, samples, config, **_):
        asked.append(config.signals)
        raise DataError("seen")

    monkeypatch.setattr("kvbridge.cli.calibrate.models_of", lambda *_: [pair.sender, pair.receiver])
    monkeypatch.setattr("kvbridge.cli.calibrate.calibrate", refuse)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n\n".join(pair.texts))
    kvbridge(
        "gate",
        "calibrate",
        pair.asset.path,
        "--data",
        texts,
        "--out",
        tmp_path / "new",
        *given,
        code=1,
    )
    assert asked == [signals]


def test_signals_that_gave_no_number_are_named(kvbridge, pair, tmp_path, monkeypatch):
    kept = tuple(s for s in DEFAULT_SIGNALS if s != "leverage")
    monkeypatch.setattr("kvbridge.cli.calibrate.models_of", lambda *_: [pair.sender, pair.receiver])
    monkeypatch.setattr(
        "kvbridge.cli.calibrate.calibrate",
        lambda *_, **__: made_calibration(pair, signals=kept, report=REPORT, rungs=()),
    )
    monkeypatch.setattr(
        "kvbridge.cli.calibrate.load_calibration",
        lambda *_: made_calibration(pair, signals=kept, report=REPORT),
    )
    monkeypatch.setattr(
        "kvbridge.cli.calibrate.load_asset", lambda _: replace(pair.asset, factors={})
    )
    texts = tmp_path / "texts.txt"
    texts.write_text("\n\n".join(pair.texts))
    _, said = kvbridge(
        "gate", "calibrate", pair.asset.path, "--data", texts, "--out", tmp_path / "new"
    )
    assert (
        "left out: leverage: no number for this pair at every of these tails (the asset carries "
        "no factor" in said
    )
