"""Collecting a pool, resuming it, and putting a study's tables into a page."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from random import Random

import numpy as np
import pytest
import torch

import kvbridge
from benchmarks.gates import pool as gate_pool
from benchmarks.gates.__main__ import app
from benchmarks.gates.attacks import ATTACKS
from benchmarks.gates.lines import Pool
from benchmarks.gates.pool import CollectCommand, bind, collect
from benchmarks.gates.separation import separation
from benchmarks.gates.source import Source, data_source, demo_documents, demo_pool, prompts
from benchmarks.gates.study import savings
from benchmarks.gates.wrong import wrong_caches
from kvbridge.cli.ending import run_to_the_end
from kvbridge.errors import DataError, UsageError
from kvbridge.gates.calibrate.job import gather
from kvbridge.gates.calibrate.passing import prompts_of
from kvbridge.gates.labels.outcomes import Outcome
from kvbridge.gates.signals import DEFAULT_SIGNALS, SIGNALS, parts_of
from kvbridge.handoff.cost import prefill_flops
from tests.models import random_texts

PLAN = gate_pool.PLAN


@pytest.fixture
def program(monkeypatch):
    """Runs `python -m benchmarks.gates` in this process; returns nothing where it exits with
    `code`."""

    def run(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["gates", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run_to_the_end(app)
        assert (ended.value.code or 0) == code

    return run


@pytest.fixture(scope="module")
def source(pair):
    pool = [prompts(f"text/{i}", str(i), t, 2) for i, t in enumerate(random_texts(6, 500, seed=5))]
    held = [
        prompts(f"statistics/{i}", f"s{i}", t, 2)
        for i, t in enumerate(random_texts(6, 400, seed=6))
    ]
    return Source(
        pair.bridge(),
        pool,
        held,
        [(f"d{i}", t) for i, t in enumerate(random_texts(4, 1100, seed=7))],
    )


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory):
    """A pool of the tiny pair, collected in batches of two texts, cut in the middle of a line, and
    resumed."""
    out = tmp_path_factory.mktemp("pool")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate_pool, "TOGETHER", 2)
        bind(out, source)
        extras = gather(source.bridge, source.statistics, PLAN)
        for name in gate_pool.COLLECTED:
            collect(name, source, extras, source.pool, out)
            whole = (out / name).read_bytes()
            (out / name).write_bytes(whole[:-40])
            collect(name, source, extras, source.pool, out)
            assert (out / name).read_bytes() == whole, "a cut run gives the same lines"
    return out


def test_the_pool_holds_every_request_once_and_every_wrong_cache(source, folder):
    pool = Pool.read(folder)
    right = pool.cases["right"]
    assert len({r["id"] for r in right}) == len(right) >= 6
    assert {r["document"] for r in right} == {str(i) for i in range(6)}
    assert set(pool.cases) == {"right", "rung", "wrong_document", *ATTACKS}
    assert all(
        set(r["signals"]) == {c for s in SIGNALS.values() for c in s.columns}
        for r in right
        if "signals" in r
    )
    assert pool.kinds == ["text"]
    assert pool.receiver.digest == source.bridge.receiver.geometry.digest
    items = pool.items("kl", pool.quantile("kl", 0.5))
    assert 0.3 < np.mean([i.attempts[0].damaged for i in items]) < 0.7
    right_first = np.median([r["signals"]["sender_first"] for r in right])
    assert all(
        r["signals"]["sender_first"] > right_first + 2
        for r in pool.cases["wrong_document"]
        if "signals" in r
    )


def test_lines_of_another_asset_are_not_mixed(source, folder, tmp_path):
    about = json.loads((folder / gate_pool.ABOUT).read_text())
    (tmp_path / gate_pool.ABOUT).write_text(json.dumps({**about, "translator": "0" * 64}))
    with pytest.raises(UsageError, match="another --out"):
        bind(tmp_path, source)
    (tmp_path / gate_pool.ABOUT).unlink()
    (tmp_path / "pool.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match="name no asset"):
        bind(tmp_path, source)
    with pytest.raises(DataError, match="collect first"):
        Pool.read(tmp_path / "nothing")


def test_requests_share_no_document_with_the_fit_or_the_statistics(pair, tmp_path, monkeypatch):
    fitted = {d.group for d in demo_documents()}
    assert not fitted & {s.document for s in demo_pool(fitted, 1)}
    monkeypatch.setattr(
        "kvbridge.load", lambda name, **_: {"a": pair.sender, "b": pair.receiver}[name]
    )
    for split in ("train", "validation", "test"):
        rows = [
            {"id": f"{split}{i}", "document": f"{split}{i // 2}", "kind": f"k{i % 2}", "text": t}
            for i, t in enumerate(random_texts(8, 500))
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    split_source = data_source(pair.asset.path, str(tmp_path), ("a", "b"), 2)
    assert {s.document for s in split_source.pool} == {f"test{i}" for i in range(4)}
    assert {s.document for s in split_source.statistics} == {f"validation{i}" for i in range(4)}
    assert {s.id.split("/")[0] for s in split_source.pool} == {"k0", "k1"}
    only = data_source(pair.asset.path, str(tmp_path / "test.jsonl"), ("a", "b"), 2)
    assert only.statistics
    assert not {s.document for s in only.pool} & {s.document for s in only.statistics}
    with pytest.raises(UsageError, match="together"):
        gate_pool.run(CollectCommand(tmp_path, data="x"))


def study_body():
    def runs(coverage):
        return {
            "request": {
                "n": 300,
                "calibrated": 1.0,
                "coverage": coverage,
                "violations": 4,
                "violation_ci": [0.004, 0.03],
            },
            "document": {"n": 300, "violations": 20, "violation_ci": [0.04, 0.1]},
            "net_saving": -0.4,
        }

    return {
        "requests": 9,
        "documents": 3,
        "tokens": [10, 20, 30, 40, 50],
        "contract_refused": 0,
        "shares": {"handoff": 0.85, "gate": 0.2, "gate_of_all": 0.5},
        "labels": {
            "next_token": {
                "n": 6,
                "damaged": 0.3,
                "recalibrations": {"0.1/0.05": runs(0.4), "0.05/0.05": runs(0.1)},
            },
            "lost_answer": {"n": 3, "damaged": 0.9, "recalibrations": {"0.1/0.05": runs(0.0)}},
        },
        "wrong_columns": {"length": 0.5},
        "carried": {"kl > 1": {"a → b": {"why": "too few"}}},
        "wrong": {
            "all signals": {
                "extra_refusals": 0.001,
                "cases": {},
                "every_wrong_document": {"n": 5, "passed": 0, "bound_95": 0.45},
            }
        },
        "ladder": {"next_token": {"n": 4, "second_rung_affordable": 0.0}},
    }


PAGE = (
    "# Gates\n<!-- demo: headline -->\nold\n<!-- end -->\ntext\n<!-- demo: tables "
    "-->\nold\n<!-- end -->\n<!-- real: headline -->\nkept\n<!-- end -->\n"
)


def test_tables_go_into_their_section_null_results_first(tmp_path, program, capsys):
    (tmp_path / "study.json").write_text(json.dumps(study_body()))
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    arguments = ("tables", tmp_path / "study.json", "--into", page, "--section")
    program(*arguments, "demo")
    text = page.read_text()
    first = text.split("<!-- demo: headline -->\n")[1].splitlines()
    assert first[0].startswith("**Null results**")
    assert "lost_answer (90 % damaged)" in first[0]
    assert "next_token" not in first[0]
    assert "α = 10 %" in first[2]
    assert "the default signals 20 % and all signals 50 %" in text
    headings = [place for place, line in enumerate(text.splitlines()) if line.startswith("####")]
    assert len(headings) == 7
    assert all(text.splitlines()[place + 2].endswith("?") for place in headings)
    assert "kept" in text
    assert "old" not in text
    program(*arguments, "demo")
    assert page.read_text() == text, "putting them in twice changes nothing"
    program(*arguments, "other", code=2)
    assert "other: headline" in capsys.readouterr().err
    assert page.read_text() == text


def test_a_transfer_that_stopped_leaves_the_first_quarter_right(source):
    request = next(
        iter(prompts_of(source.pool[0], source.bridge.sender, source.bridge.receiver, native=False))
    )
    donor = kvbridge.capture(source.bridge.sender, source.donors[0][1])
    snapshot = ATTACKS["late_layers"](request, donor, Random(0), source.bridge.sender)
    count = len(request.snapshot)
    assert all(
        torch.equal(snapshot.layers[0][n], request.snapshot.layers[0][n]) for n in ("k", "v")
    )
    for layer in range(1, 4):
        assert all(
            torch.equal(snapshot.layers[layer][n], donor.layers[layer][n][:count])
            for n in ("k", "v")
        )


def made_pool(pair, **wrong):
    """300 requests of which only the receiver's tail loss tells the damaged ones; wrong caches
    whose column is high."""
    rng = np.random.default_rng(0)
    columns = [c for s in SIGNALS.values() for c in s.columns]
    flops = dict.fromkeys(parts_of(SIGNALS), 10)
    rows = []
    for i in range(300):
        signals = dict(zip(columns, rng.normal(size=len(columns)), strict=True))
        outcome = asdict(
            Outcome(
                flip=signals["receiver_loss"] > 0.5,
                diverges=4,
                kl=max(0.0, signals["receiver_loss"]),
            )
        )
        rows.append(
            {
                "id": str(i),
                "document": str(i // 3),
                "kind": "text",
                "case": "right",
                "tokens": 64,
                "signals": signals,
                "handoff_flops": 7,
                "gate_flops": flops,
                "outcome": outcome,
            }
        )
    cases = {"right": rows}
    for case, column in wrong.items():
        cases[case] = [{**r, "case": case, "signals": {**r["signals"], column: 99.0}} for r in rows]
    return Pool(cases, pair.receiver.geometry)


def test_users_get_the_default_signals_and_a_study_is_of_these(pair):
    pool = made_pool(pair)
    items = pool.items("kl", 0.5)
    assert (
        items[0].attempts[0].flops
        == 7 + 10 * len(parts_of(DEFAULT_SIGNALS))
        < 7 + 10 * len(parts_of(SIGNALS))
    )
    told = separation(items, "kl")
    assert 0.3 < told["score"] < 0.7
    assert told["score_of_all"] > 0.9
    assert told["score_without_sender"] is not None
    dense = prefill_flops(pair.receiver.geometry, 64)
    assert savings(pool) == pytest.approx(
        {
            "handoff": 7 / dense,
            "gate": 10 * len(parts_of(DEFAULT_SIGNALS)) / dense,
            "gate_of_all": 10 * len(parts_of(SIGNALS)) / dense,
        }
    )


def test_wrong_caches_by_who_sees_them(pair):
    wrong = {
        "wrong_document": "sender_early",
        "late_layers": "sender_tail",
        "shuffled": "tail_k_low",
    }
    by_limits = wrong_caches(made_pool(pair, **wrong))
    passed = {
        name: {case: one["passed"] for case, one in body["cases"].items()}
        for name, body in by_limits.items()
    }
    most = by_limits["default signals"]["of"] * 0.8
    assert next(iter(by_limits)) == "default signals"
    assert passed["all signals"] == dict.fromkeys(wrong, 0)
    assert passed["default signals"]["wrong_document"] == passed["default signals"]["shuffled"] == 0
    assert passed["default signals"]["late_layers"] > most
    assert passed["without the sender model"]["wrong_document"] > most
    assert passed["without the sender model"]["shuffled"] == 0
    assert not {"sender_early", "sender_first"} & set(
        by_limits["without the sender model"]["signals"]
    )


def test_lines_of_other_signals_are_refused(folder, tmp_path):
    (tmp_path / gate_pool.ABOUT).write_bytes((folder / gate_pool.ABOUT).read_bytes())
    (tmp_path / "pool.jsonl").write_text(
        (folder / "pool.jsonl").read_text().replace('"sender_early"', '"sender_soon"')
    )
    with pytest.raises(DataError, match=r"sender_early, sender_soon\); collect again"):
        Pool.read(tmp_path)


def test_a_study_of_too_few_requests_is_refused_in_one_line(folder, program, capsys):
    program("study", folder, code=1)
    assert capsys.readouterr().err.startswith("kvbridge: ")
