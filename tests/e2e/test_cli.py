"""Commands as a user runs them: real processes, real models, exit codes and one-line refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbridge.eval.conditions.names import defaults


def kvbridge(*arguments: object, code: int = 0) -> tuple[str, str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "kvbridge.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == code, done.stderr[-2000:]
    return done.stdout, done.stderr


def few(path: Path, *, documents: int = 24) -> Path:
    """A data folder with the beginnings of some demo documents per split."""
    from kvbridge import demo

    path.mkdir()
    for split in ("train", "validation", "test"):
        lines = demo.texts(split).read_text("utf-8").splitlines()[:documents]
        (path / f"{split}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return path


@pytest.fixture(scope="module")
def asset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    out = folder / "asset"
    data = few(folder / "data", documents=40)
    stdout, _ = kvbridge(
        "fit",
        "demo:sender",
        "demo:receiver",
        "--data",
        data,
        "--out",
        out,
        "--max-tokens",
        64,
        "--layers",
        2,
        "--json",
    )
    body = json.loads(stdout)
    assert body["digest"]
    assert body["timings"]["ratio_to_forward"] > 1
    return out


def test_fit_verify_inspect_and_evaluate(asset: Path, tmp_path: Path) -> None:
    assert "sound" in kvbridge("verify", asset)[0]
    assert json.loads(kvbridge("inspect", asset, "--json")[0])["family"] == "full-head"
    out = tmp_path / "run"
    run = ("eval", "run", asset, "--out", out, "--limit", 12, "--tasks", "recall", "--json")
    first = json.loads(kvbridge(*run)[0])
    assert set(first["conditions"]) >= {
        "native",
        "sender",
        "translated",
        "token_only",
        "wrong_document",
        "tail_only32",
    }
    rows = (out / "rows.jsonl").read_text("utf-8").splitlines()
    assert len(rows) == 12 * len(defaults())
    for name in ("run.json", "summary.json", "report.html", "summary.md"):
        assert (out / name).stat().st_size > 0


def test_a_cut_run_continues_and_gives_the_same_summary(asset: Path, tmp_path: Path) -> None:
    run = (
        "eval",
        "run",
        asset,
        "--limit",
        6,
        "--tasks",
        "recall",
        "--conditions",
        "native,sender,translated,no_context",
    )
    kvbridge(*run, "--out", tmp_path / "whole")
    kvbridge(*run, "--out", tmp_path / "cut")
    rows = tmp_path / "cut" / "rows.jsonl"
    kept = rows.read_bytes()
    rows.write_bytes(kept[: int(len(kept) * 0.6)])
    kvbridge(*run, "--out", tmp_path / "cut")
    continued, whole = (losses(path) for path in (rows, tmp_path / "whole" / "rows.jsonl"))
    assert continued == pytest.approx(whole)


def losses(path: Path) -> dict[str, float]:
    """Loss of each row by item and condition; a row that stands twice is an error."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    by_row = {f"{row['item']} {row['condition']}": row["loss"] for row in rows}
    assert len(by_row) == len(rows)
    return by_row


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fit", "a"), "RECEIVER"),
        (("nosuch",), "nosuch"),
        (("fit", "a", "b", "--out", "x", "--layers", "z"), "--layers"),
        (("registry", "ls", "--nosuch"), "--nosuch"),
    ],
    ids=["missing", "command", "value", "option"],
)
def test_a_usage_error_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    stdout, stderr = kvbridge(*arguments, code=2)
    assert stdout == ""
    (line,) = stderr.splitlines()
    assert line.startswith("kvbridge: ")
    assert words in line
    assert "--help" in line


def test_a_dry_run_over_budget_is_a_refusal_that_names_what_fits() -> None:
    run = ("fit", "demo:sender", "demo:receiver", "--out", "unused", "--dry-run", "--json")
    assert json.loads(kvbridge(*run)[0])["fits"] is True
    stdout, stderr = kvbridge(*run, "--memory-bytes", 30_000_000, code=1)
    assert json.loads(stdout)["fits"] is False
    assert "would fit" in stderr or "--memory-bytes" in stderr


def test_models_in_the_wrong_roles_are_refused_before_anything_runs(
    asset: Path, tmp_path: Path
) -> None:
    swapped = ("--sender", "demo:receiver", "--receiver", "demo:sender")
    for command in (
        ("eval", "run", asset, "--out", tmp_path / "run"),
        ("gate", "calibrate", asset),
    ):
        _, stderr = kvbridge(*command, *swapped, code=2)
        assert "fitted for demo:sender as its sender" in stderr
    assert not (tmp_path / "run").exists()


def test_summary_is_recomputed_from_the_rows(asset: Path, tmp_path: Path) -> None:
    from kvbridge.eval.report.summary import dumps, summarise
    from kvbridge.eval.run.rows import read_rows

    out = tmp_path / "run"
    kvbridge("eval", "run", asset, "--out", out, "--limit", 5, "--tasks", "continuation")
    meta: dict[str, Any] = json.loads((out / "run.json").read_text("utf-8"))
    assert dumps(summarise(read_rows(out / "rows.jsonl").rows, meta)) == (
        out / "summary.json"
    ).read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("fit", "demo:nobody", "demo:receiver", "--out", "x"), 1, "demo:sender"),
        (
            ("fit", "demo:sender", "demo:receiver", "--out", "x", "--family", "none-such"),
            2,
            "full-head",
        ),
        (
            ("fit", "demo:sender", "demo:receiver", "--out", "x", "--data", "absent.jsonl"),
            1,
            "absent.jsonl",
        ),
        (
            ("fit", "demo:sender", "demo:receiver", "--out", "x", "--memory-bytes", "1000"),
            1,
            "bytes",
        ),
        (("fit", "demo:sender", "demo:receiver", "--out", "x", "--device", "cuda"), 2, "cuda"),
        (("fit", "demo:sender", "demo:sender", "--out", "x"), 2, "same model"),
        (("verify", "absent"), 1, "absent"),
        (("eval", "run", "absent"), 1, "absent"),
        (("fit", "demo:sender"), 2, ""),
        (("no-such-command",), 2, ""),
    ],
)
def test_refusals_exit_with_one_line(
    arguments: tuple[str, ...], code: int, says: str, tmp_path: Path
) -> None:
    import shutil

    if shutil.which("nvidia-smi") and "cuda" in arguments:
        pytest.skip("there is a CUDA device here")
    placed = tuple(str(tmp_path / a) if a == "x" else a for a in arguments)
    _, stderr = kvbridge(*placed, code=code)
    assert says in stderr
    assert "Traceback" not in stderr
    if says:
        assert [
            line for line in stderr.splitlines() if line.startswith("kvbridge:")
        ] == stderr.splitlines()[-1:]
    assert not (tmp_path / "x").exists()


def test_dry_run_prints_the_plan_alone(tmp_path: Path) -> None:
    body = json.loads(
        kvbridge(
            "fit", "demo:sender", "demo:receiver", "--out", tmp_path / "x", "--dry-run", "--json"
        )[0]
    )
    assert body["moments_bytes"] > 0
    assert body["peak_bytes"] <= body["budget_bytes"]
    assert not (tmp_path / "x").exists()
