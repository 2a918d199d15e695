"""Documents that the translator was fitted on are no documents to judge it or its gate by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvbridge
from kvbridge import demo
from kvbridge.asset.folder import load_asset
from kvbridge.cli.evaluate import EvalCommand, run_eval
from kvbridge.cli.samples import samples_of
from kvbridge.errors import UsageError
from kvbridge.fitting.data import read_documents
from kvbridge.fitting.splits import split_of


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, str]]:
    """Texts in one file that names no splits, an asset fitted on it, and the split of each
    document."""
    folder = tmp_path_factory.mktemp("unsplit")
    rows = [json.loads(line) for line in demo.texts("train").read_text("utf-8").splitlines()]
    chosen = list({row["document"]: row for row in rows}.values())[:40]
    data = folder / "mine.jsonl"
    data.write_text(
        "".join(
            json.dumps({"document": f"mine/{row['document']}", "text": row["text"]}) + "\n"
            for row in chosen
        ),
        "utf-8",
    )
    config = kvbridge.FitConfig(
        layers=1, max_tokens=64, force=True, cosine_documents=1, fractions=(0.5, 0.2, 0.3)
    )
    sender, receiver = kvbridge.load("demo:sender"), kvbridge.load("demo:receiver")
    kvbridge.save_asset(kvbridge.fit(sender, receiver, str(data), config=config), folder / "asset")
    return (
        data,
        folder / "asset",
        {d.group: split_of(d, config.fractions) for d in read_documents(str(data))},
    )


def evaluated(asset: Path, data: Path, out: Path) -> list[dict[str, Any]]:
    run_eval(EvalCommand(asset, out, data=str(data), conditions=("native",), as_json=True))
    return [json.loads(line) for line in (out / "rows.jsonl").read_text("utf-8").splitlines()]


def test_a_file_without_splits_is_evaluated_on_what_its_fit_held_out(
    unsplit: Any, tmp_path: Path
) -> None:
    data, asset, splits = unsplit
    rows = evaluated(asset, data, tmp_path)
    assert {splits[row["document"]] for row in rows if row["status"] == "ok"} == {"test"}
    left_out = {
        row["document"]
        for row in rows
        if row["reason"] == "the translator was fitted on its document"
    }
    assert left_out == {name for name, split in splits.items() if split != "test"}


def test_texts_that_were_all_fitted_on_are_refused(unsplit: Any, tmp_path: Path) -> None:
    data, asset, splits = unsplit
    rows = [json.loads(line) for line in data.read_text("utf-8").splitlines()]
    seen = tmp_path / "seen.jsonl"
    seen.write_text(
        "".join(json.dumps(row) + "\n" for row in rows if splits[row["document"]] != "test"),
        "utf-8",
    )
    with pytest.raises(
        UsageError, match=r"every document .* fitted on its document; give other texts"
    ):
        evaluated(asset, seen, tmp_path / "run")
    with pytest.raises(UsageError, match="fitted on every document"):
        samples_of(str(seen), "next_token", None, load_asset(asset).manifest.knows)


def test_a_gate_is_calibrated_on_what_the_fit_held_out(
    unsplit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data, asset, splits = unsplit
    samples = samples_of(str(data), "next_token", None, load_asset(asset).manifest.knows)
    assert {splits[sample.document] for sample in samples} == {"test"}
    left_out = sum(split != "test" for split in splits.values())
    assert f"{left_out} of {len(splits)} rows left out" in capsys.readouterr().err


def test_an_asset_that_names_no_documents_knows_none(unsplit: Any) -> None:
    _, asset, splits = unsplit
    manifest = load_asset(asset).manifest
    old = type(manifest).from_json(
        {k: v for k, v in manifest.body.items() if k != "fitted_on"}, "old"
    )
    assert old.fitted_on is None
    assert not any(old.knows(name) for name in splits)
    assert sum(manifest.knows(name) for name in splits) == sum(
        split != "test" for split in splits.values()
    )


def test_an_asset_that_names_no_documents_is_said_to(
    unsplit: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, asset, _ = unsplit
    evaluated(asset, data, tmp_path / "new")
    assert "does not say" not in capsys.readouterr().err
    monkeypatch.setattr("kvbridge.asset.manifest.Manifest.fitted_on", None)
    evaluated(asset, data, tmp_path / "old")
    assert "does not say which documents it was fitted on" in capsys.readouterr().err
