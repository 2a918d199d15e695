"""`gated` behind a ladder: every request climbs as the thresholds were calibrated, and is compared with its own rung ungated."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import kvbridge
from kvbridge import Bridge, RepairPlan
from kvbridge.asset.folder import Asset, load_asset, load_controls
from kvbridge.cli.evaluate import EvalCommand, gate_for, run_eval
from kvbridge.errors import EvalError
from kvbridge.eval.conditions.names import (
    against,
    controls,
    defaults,
    named,
    with_references,
)
from kvbridge.eval.conditions.prompt import Prompt
from kvbridge.eval.conditions.setup import Setup, _ladder, plans_of
from kvbridge.eval.report.markdown import markdown
from kvbridge.eval.report.summary import summarise
from kvbridge.eval.run.evaluate import Job, item_rows, pair_digest
from kvbridge.eval.run.rows import Row
from kvbridge.eval.statistics.contrasts import all_contrasts
from kvbridge.eval.statistics.gated import gate, gate_arrays
from kvbridge.eval.statistics.routing import risk_coverage
from kvbridge.eval.statistics.table import Table
from kvbridge.eval.tasks.chosen import make_items
from kvbridge.eval.tasks.items import RawItem, demo_rows
from kvbridge.gates.calibrate.config import CALIBRATION_SPLITS, GateConfig, split_of
from kvbridge.gates.calibrate.job import calibrate
from kvbridge.gates.calibrate.passing import Sample, watch
from kvbridge.gates.decide import CalibratedGate, Ladder
from kvbridge.gates.decide import ladder as ladders
from kvbridge.gates.decide.calibration import save_calibration
from kvbridge.gates.decide.sealed import Calibration
from kvbridge.handoff.cost import prefill_flops, request_parts
from kvbridge.handoff.request import Request
from kvbridge.model.model import Model
from tests.eval.conftest import PAIR

TAILS = (5, 17)


def row(condition: str, item: int, tail: int | None = None, **more: Any) -> Row:
    """A continuation row of item `item`."""
    figures = {"loss": 1.0, "tokens": 1, "characters": 1, "kl": 0.0, "agreement": 1.0} | more
    return Row(
        pair=PAIR,
        item=str(item),
        document=f"d{item}",
        task="continuation",
        condition=condition,
        tail=tail,
        **figures,
    )


def ladder_rows() -> list[Row]:
    """Three requests that ended at tails 5, 17 and 5; KL of item i at tail t is i + t / 100."""
    rows = [row("native", i) for i in range(3)]
    for tail in TAILS:
        for route in ("translated", *controls()):
            rows += [
                row(named(route, tail), i, tail, kl=i + tail / 100, loss=2.0 + i + tail / 100)
                for i in range(3)
            ]
    for i, (tail, score, verdict) in enumerate(
        ((5, 0.1, "use"), (17, 0.2, "use"), (5, 0.9, "discard"))
    ):
        rows.append(row("gated", i, tail, score=score, verdict=verdict))
    return rows


def test_each_request_is_paired_with_the_translation_at_its_own_tail() -> None:
    table = Table.of("continuation", ladder_rows())
    arrays = gate_arrays(table)
    assert arrays is not None
    assert arrays[0] == [0.05, 1.17, 2.05]
    found = gate(table)
    assert found is not None
    assert found["tails"] == {"5": {"n": 2, "accepted": 1}, "17": {"n": 1, "accepted": 1}}
    made, not_run = all_contrasts({"continuation": table})
    over = {c.against: c.difference.estimate for c in made if c.condition == "gated"}
    assert set(over) == {"translated_own_tail", *(f"{route}_own_tail" for route in controls())}
    assert over["translated_own_tail"] == pytest.approx((2.05 + 3.17 + 4.05) / 3 - 1)
    assert not [lack for lack in not_run if lack[1] == "gated"]


def test_a_request_whose_own_rung_is_missing_is_left_out_and_not_paired_with_another() -> None:
    rows = [r for r in ladder_rows() if (r.condition, r.item) != ("translated_tail17", "1")]
    arrays = gate_arrays(Table.of("continuation", rows))
    assert arrays is not None
    assert arrays[2] == ["0", "2"]


def test_one_tail_has_its_plain_names() -> None:
    rows = [r if r.condition != "gated" else replace(r, tail=17) for r in ladder_rows()]
    table = Table.of("continuation", rows)
    assert not [name for name in table.cells if "own" in name]
    assert {
        c.against for c in all_contrasts({"continuation": table})[0] if c.condition == "gated"
    } == {
        "translated_tail17",
        "token_only_tail17",
        "wrong_document_tail17",
        "tail_only17",
    }
    assert against("gated", 9) == (
        "translated_tail9",
        "token_only_tail9",
        "wrong_document_tail9",
        "tail_only9",
        "raw_sender_tail9",
    )


def test_what_the_summary_and_the_markdown_say_of_rungs() -> None:
    summary = summarise(ladder_rows())
    text = markdown(summary)
    assert (
        "Repair ladder, Continuation: 2 ended at tail 5, 1 of them accepted, 1 ended at tail 17"
        in text
    )
    assert "own_tail" not in " ".join(summary["conditions"]), (
        "no condition of the run bears that name"
    )
    once = summarise([r if r.condition != "gated" else replace(r, tail=17) for r in ladder_rows()])
    assert "ladder" not in markdown(once)
    known = {"pair": {"digest": PAIR, "gate_tails": list(TAILS)}}
    unclimbed = summarise(
        [r if r.condition != "gated" else replace(r, tail=5) for r in ladder_rows()], known
    )
    assert "3 ended at tail 5, 2 of them accepted, 0 ended at tail 17" in markdown(unclimbed)


def test_references_are_the_translations_at_every_tail() -> None:
    assert with_references(("gated",), *TAILS) == (
        "gated",
        "native",
        "translated_tail5",
        "translated_tail17",
    )
    assert with_references(("native",), *TAILS) == ("native",)


@dataclass(frozen=True)
class Calibrated:
    """A real calibration of the demo pair with two rungs, its stop lowered to the median score so that half of all climb."""

    asset: Asset
    sender: Model
    receiver: Model
    rows: list[RawItem]
    calibration: Calibration

    def setup(self, calibration: Calibration) -> Setup:
        """The pair behind a gate of `calibration`."""
        controls = load_controls(self.asset, None)
        plan = calibration.rungs[0].plan
        return Setup.of(
            self.asset,
            controls,
            self.sender,
            self.receiver,
            gate=CalibratedGate(calibration),
            plan=plan,
        )


@pytest.fixture(scope="module")
def calibrated(demo_asset: Path) -> Calibrated:
    asset = load_asset(demo_asset)
    sender, receiver = kvbridge.load("demo:sender"), kvbridge.load("demo:receiver")
    parts: dict[str, list[RawItem]] = {name: [] for name in CALIBRATION_SPLITS}
    for raw in {r.document: r for r in demo_rows("recall")}.values():
        parts[split_of(raw.document)].append(raw)
    rows = [raw for some in parts.values() for raw in some[:20]]
    samples = [Sample(r.id, r.document, r.body["context"], (260, 300)) for r in rows]
    bridge, plans = (
        Bridge(asset, sender=sender, receiver=receiver),
        tuple(RepairPlan(tail=t) for t in TAILS),
    )
    middle = median(s.outcome.kl for s in watch(bridge, samples, plans[1]) if s.outcome is not None)
    config = GateConfig(
        label="kl",
        tau=middle,
        alpha=0.6,
        lenient_alpha=0.9,
        delta=0.5,
        plans=plans,
        signals=("next_token", "length"),
    )
    heard: list[int] = []
    found = calibrate(bridge, samples, config, progress=heard.append)
    each = sum(len(s.ends) for s in samples if split_of(s.document) != "statistics")
    assert heard == sorted(set(heard)), "progress goes on from rung to rung"
    assert each < heard[-1] <= len(plans) * each
    assert found.strict is not None
    assert found.lenient is not None
    first = Bridge(asset, sender=sender, receiver=receiver, gate=CalibratedGate(found))
    fresh, _ = make_items(parts["report"][:20], sender, receiver)
    handed = [
        first.handoff(kvbridge.capture(sender, i.prompt), i.prompt, repair=plans[0]) for i in fresh
    ]
    stop = median(h.decision.score for h in handed if h.decision.score is not None)
    strict, lenient = (
        replace(x, threshold=min(x.threshold, stop)) for x in (found.strict, found.lenient)
    )
    return Calibrated(
        asset, sender, receiver, rows, replace(found, stop=stop, strict=strict, lenient=lenient)
    )


def shared_flops(bridge: Bridge, text: str, plan: RepairPlan) -> int:
    """What a later rung takes over: the translation and the receiver's first layers."""
    snapshot = kvbridge.capture(bridge.sender, text)
    request = Request(snapshot, text, bridge.pair.receiver.encode(text), plan, observed=True)
    parts = request_parts(bridge.pair, bridge.prepare([request])[0])
    return parts["translate"] + parts["prefill"]


def test_a_ladder_end_to_end(
    calibrated: Calibrated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows as climbing rung by rung with plain bridges gives them, the curve from each request's own rung, the report."""
    save_calibration(calibrated.calibration, tmp_path / "gate")
    monkeypatch.setattr(
        "kvbridge.cli.evaluate.demo_rows",
        lambda split: calibrated.rows if split == "recall" else [],
    )
    out = tmp_path / "run"
    run_eval(
        EvalCommand(
            calibrated.asset.path,
            out,
            conditions=("gated",),
            gate=str(tmp_path / "gate"),
            as_json=True,
        )
    )
    lines = [json.loads(line) for line in (out / "rows.jsonl").read_text("utf-8").splitlines()]
    cells = {(r["condition"], r["item"]): r for r in lines if r["status"] == "ok"}
    assert {name for name, _ in cells} == {
        "gated",
        "native",
        "translated_tail5",
        "translated_tail17",
    }
    gated = {item: r for (name, item), r in cells.items() if name == "gated"}
    assert {r["tail"] for r in gated.values()} == set(TAILS), "some climb, some do not"
    asset, sender, receiver = calibrated.asset, calibrated.sender, calibrated.receiver
    found = gate_for(asset, str(tmp_path / "gate"))[0]
    assert isinstance(found, CalibratedGate)
    bridge = Bridge(asset, sender=sender, receiver=receiver, gate=found)
    items, _ = make_items(calibrated.rows, sender, receiver)
    prompts = {item.id: item.prompt for item in items}
    for name, ended in gated.items():
        text, spent, last, paid = prompts[name], 0, 0, 0
        dense = prefill_flops(receiver.geometry, len(receiver.encode(text)))
        for tail in TAILS:
            if spent + last >= dense:
                break
            decision = bridge.handoff(
                kvbridge.capture(sender, text), text, repair=RepairPlan(tail=tail)
            ).decision
            last, reached = decision.predicted_flops or 0, tail
            shared = 0 if tail == TAILS[0] else shared_flops(bridge, text, RepairPlan(tail=tail))
            spent, paid = spent + last, paid + last - shared
            assert decision.score is not None
            if decision.score <= calibrated.calibration.stop:
                break
        assert (ended["tail"], ended["verdict"]) == (reached, decision.verdict)
        assert ended["score"] == pytest.approx(decision.score, abs=1e-6)
        assert ended["flops"] == paid + (0 if decision.accepted else dense)
        if decision.accepted:
            assert ended["kl"] == pytest.approx(
                cells[named("translated", reached), name]["kl"], abs=1e-4
            )
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    lost = [
        cells["native", i]["correct"] * (1 - cells[named("translated", r["tail"]), i]["correct"])
        for i, r in gated.items()
    ]
    curve = risk_coverage(lost, [r["score"] for r in gated.values()])
    assert summary["gate"]["recall"]["aurc"] == pytest.approx(curve.aurc, rel=1e-5, abs=1e-9)
    assert summary["pair"]["gate_tails"] == list(TAILS)
    assert "Repair ladder: " in (out / "report.html").read_text("utf-8")


def test_one_rung_gives_the_rows_that_a_bridge_gives(calibrated: Calibrated) -> None:
    whole = calibrated.calibration
    single = replace(whole, rungs=whole.rungs[:1], stop=1.0)
    setup = calibrated.setup(single)
    assert setup.ladder is None
    forced = replace(
        setup,
        ladder=_ladder(calibrated.asset, setup.sender, setup.receiver, CalibratedGate(single)),
    )
    items, _ = make_items(calibrated.rows[-4:], setup.sender, setup.receiver)
    for item in items:
        plain, climbed = (
            item_rows(s, Job("p", item, "", ("native", "gated"))) for s in (setup, forced)
        )
        for a, b in zip(plain, climbed, strict=True):
            assert replace(a, ttft_ms=None) == replace(b, ttft_ms=None)
    assert calibrated.setup(whole).tails == TAILS
    assert pair_digest(calibrated.setup(whole)) != pair_digest(setup), "other rungs, other run"
    assert {named("token_only", t) for t in TAILS} <= set(defaults(calibrated.setup(whole)))


def test_a_refusal_for_cost_names_the_rung_that_was_tried(
    calibrated: Calibrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = replace(calibrated.calibration, stop=0.0, strict=None)
    assert never.lenient is not None
    never = replace(never, lenient=replace(never.lenient, threshold=0.0))
    setup = calibrated.setup(never)
    assert isinstance(setup.ladder, Ladder)
    (item, *_), _ = make_items(calibrated.rows[-2:], setup.sender, setup.receiver)
    prompt = Prompt(setup, item, "")
    assert setup.ladder.climb(prompt.snapshot, item.prompt)[1].plan.tail == TAILS[1]
    monkeypatch.setattr(ladders, "prefill_flops", lambda *_: 1)
    assert setup.ladder.climb(prompt.snapshot, item.prompt)[1].plan.tail == TAILS[0]


def test_rungs_that_differ_in_more_than_their_tail_are_refused(
    calibrated: Calibrated, tmp_path: Path
) -> None:
    first, second = calibrated.calibration.rungs
    odd = replace(
        calibrated.calibration, rungs=(first, replace(second, plan=RepairPlan(sinks=9, tail=17)))
    )
    save_calibration(odd, tmp_path / "gate")
    with pytest.raises(
        EvalError,
        match=r"differ in their tail alone, found sinks 4, tail 5.*sinks 9, tail 17.*--tails",
    ):
        gate_for(calibrated.asset, str(tmp_path / "gate"))
    with pytest.raises(EvalError, match="tail alone"):
        plans_of(CalibratedGate(odd), None)
    with pytest.raises(EvalError, match="tail alone"):
        plans_of(CalibratedGate(calibrated.calibration), RepairPlan(layers=2))
    assert asdict(first.plan)["layers"] == 1
