"""Mistakes that cost nothing to find are found before a model is loaded: every command, with
loading forbidden."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbridge.cli.main import main
from kvbridge.errors import DataError
from kvbridge.fitting.data import check_data
from kvbridge.model.load import AutoModelForCausalLM
from tests.eval.conftest import demo_asset, demo_data

__all__ = ["demo_asset", "demo_data"]

Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that must end with `code` and one line, which is returned; loading a model is
    a failure."""

    def forbidden(*arguments: Any, **options: Any) -> Any:
        pytest.fail("a model was loaded first")

    def run(*arguments: object, code: int) -> str:
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", forbidden)
        monkeypatch.setattr(sys, "argv", ["kvbridge", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        error = capsys.readouterr().err
        assert ended.value.code == code, error
        assert len(error.splitlines()) == 1
        assert error.startswith("kvbridge: ")
        return error

    return run


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Data that is wrong in one way each, and a file where a folder should be."""
    for name, text in (
        ("empty.jsonl", ""),
        ("odd.jsonl", '{"words": "no text"}\n'),
        ("broken.jsonl", "{not json\n"),
        ("blank.jsonl", '{"text": " "}\n'),
        ("table.docx", "text\n"),
        ("fine.jsonl", '{"text": "one"}\n'),
    ):
        (tmp_path / name).write_text(text, "utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "train.jsonl").write_text('{"text": "one"}\n', "utf-8")
    (tmp_path / "splits" / "test.jsonl").write_text('{"words": "no text"}\n', "utf-8")
    return tmp_path


WRONG = [
    ("absent.jsonl", "no such file"),
    ("folder/absent.jsonl", "no such file"),
    ("empty.jsonl", "empty file"),
    ("odd.jsonl", "expected a row with text"),
    ("broken.jsonl", "cannot be read as json"),
    ("blank.jsonl", "none that is not empty"),
    ("table.docx", "expected a .jsonl"),
    ("folder", "expected a .jsonl"),
    ("splits", "expected a row with text"),
]


@pytest.mark.parametrize(("name", "words"), WRONG)
def test_data_that_is_wrong(
    refused: Refused, files: Path, name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert words in refused(
        "fit", "demo:sender", "demo:receiver", "--out", files / "x", "--data", files / name, code=1
    )
    monkeypatch.chdir(files)
    assert words in refused(
        "fit", "demo:sender", "demo:receiver", "--out", files / "x", "--data", name, code=1
    )
    assert not (files / "x").exists()


def test_data_that_is_fine_or_on_the_hub_is_let_through(files: Path) -> None:
    check_data(str(files / "fine.jsonl"))
    check_data("org/name")
    with pytest.raises(DataError, match="no such file"):
        check_data("org/name/more")


def test_data_that_may_not_be_read(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).suffix != ".jsonl")
    with pytest.raises(DataError, match="may be read"):
        check_data(str(files / "fine.jsonl"))


def test_out_of_every_command(
    refused: Refused, files: Path, demo_asset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = (
        ("demo",),
        ("fit", "demo:sender", "demo:receiver"),
        ("eval", "run", demo_asset),
        ("screen", "demo:sender", "demo:receiver"),
        ("gate", "calibrate", demo_asset),
    )
    for command in commands:
        assert "no folder" in refused(*command, "--out", files / "fine.jsonl" / "run", code=2)
    for command, what in ((commands[1], "assets"), (commands[4], "calibrations")):
        assert f"{what} are never overwritten" in refused(
            *command, "--out", files / "folder", code=2
        )
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)
    for command in commands:
        assert "nothing may be written in" in refused(*command, "--out", files / "run", code=2)
    assert not (files / "run").exists()


def test_nothing_is_written_into_an_asset(refused: Refused, demo_asset: Path) -> None:
    """Its sums would no longer list what is there, and it could not be loaded again."""
    before = sorted(demo_asset.iterdir())
    for out in (demo_asset, demo_asset / "run"):
        assert "nothing is added to" in refused("eval", "run", demo_asset, "--out", out, code=2)
        assert "nothing is added to" in refused(
            "screen", "demo:sender", "demo:receiver", "--out", out, code=2
        )
        assert "nothing is added to" in refused("demo", "--out", out, code=2)
    time = ("gate", "time", demo_asset, "--out", demo_asset / "speed.json")
    assert "nothing is added to" in refused(*time, code=2)
    assert sorted(demo_asset.iterdir()) == before


def test_data_and_controls_of_commands_with_an_asset(
    refused: Refused, files: Path, demo_asset: Path
) -> None:
    for command in ("eval", "run"), ("gate", "calibrate"):
        out = ("--out", files / "run")
        assert "no such file" in refused(
            *command, demo_asset, *out, "--data", files / "absent.jsonl", code=1
        )
        assert "cannot be read" in refused(
            *command, demo_asset, *out, "--data", files / "broken.jsonl", code=1
        )
    run = ("eval", "run", demo_asset, "--out", files / "run")
    assert "no control set stands at" in refused(*run, "--controls", files / "absent", code=2)
    assert "no calibration stands at" in refused(*run, "--conditions", "gated", code=2)
    assert "translated_tail0" in refused(
        "eval", "run", files / "absent", "--conditions", "translated_tail0", code=2
    )


def test_texts_too_few_for_a_calibration(refused: Refused, files: Path, demo_asset: Path) -> None:
    run = ("gate", "calibrate", demo_asset, "--out", files / "x", "--data", files / "fine.jsonl")
    assert "expected documents in every part" in refused(*run, code=1)


def test_a_run_folder_of_another_translator_or_other_texts(
    refused: Refused, files: Path, demo_asset: Path
) -> None:
    out = files / "run"
    out.mkdir()
    (out / "rows.jsonl").write_text("{}\n")
    run = ("eval", "run", demo_asset, "--out", out)
    for body, words in (
        ({"pair": {"translator_digest": "a" * 64}}, "another translator"),
        ({"data": "b" * 64}, "other texts"),
    ):
        (out / "run.json").write_text(json.dumps(body))
        assert words in refused(*run, code=1)


def test_models_that_are_not_there(refused: Refused, files: Path, demo_asset: Path) -> None:
    good, bad = "demo:sender", str(files / "absent")
    for command in (
        ("fit", good, bad, "--out", files / "x"),
        ("fit", good, bad, "--out", files / "x", "--one-at-a-time"),
        ("screen", good, bad, "--out", files / "x"),
        ("eval", "run", demo_asset, "--receiver", bad, "--out", files / "x"),
        ("gate", "calibrate", demo_asset, "--receiver", bad, "--out", files / "x"),
    ):
        assert bad in refused(*command, code=1)
    assert "same model" in refused("fit", good, good, "--out", files / "x", code=2)
    assert "different models" in refused("screen", good, good, "--out", files / "x", code=1)
    spill = ("--one-at-a-time", "--spill-folder", bad)
    assert "--spill-folder" in refused(
        "fit", good, "demo:receiver", "--out", files / "x", *spill, code=2
    )
    assert not (files / "x").exists()
