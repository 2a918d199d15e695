"""What the commands do once their arguments are read."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import kvbridge
from kvbridge import demo
from kvbridge.asset.folder import Asset, load_asset, save_asset
from kvbridge.cli.checks import check_controls, check_models, check_out, check_spill
from kvbridge.cli.output import emit, say, table
from kvbridge.cli.progress import counted, progress_of
from kvbridge.errors import EvalError, UsageError, unknown_names
from kvbridge.eval.conditions.fixed_gates import FIXED_GATES
from kvbridge.eval.conditions.plans import parsed, with_references
from kvbridge.eval.conditions.routes import CONDITIONS
from kvbridge.eval.conditions.setup import check_alike, plans_of
from kvbridge.eval.pair import Fitted, fit_line, fitted_asset, run_pair
from kvbridge.eval.report.display import Terminal
from kvbridge.eval.run.config import RunConfig
from kvbridge.eval.run.evaluate import check_run
from kvbridge.eval.run.latency import Latency, break_even, longest_text, measure_latency
from kvbridge.eval.screen.data import SEQUENCES, FleetData, screen_data
from kvbridge.eval.screen.fleet import ScreenConfig, check_fleet, screen
from kvbridge.eval.screen.verdicts import screening_table
from kvbridge.eval.tasks import TASKS
from kvbridge.eval.tasks.chosen import make_items
from kvbridge.eval.tasks.items import data_digest, demo_rows, read_raw
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.data import Document, check_data, read_documents
from kvbridge.fitting.memory import check_memory, plan_memory
from kvbridge.format import CALIBRATION, RUN_REPORT
from kvbridge.gates.decide.calibration import load_calibration
from kvbridge.gates.decide.policy import CalibratedGate
from kvbridge.handoff.plan import RepairPlan
from kvbridge.handoff.ports import Gate
from kvbridge.handoff.stages.check import difference
from kvbridge.model.model import Model

DEMO_CONFIG = FitConfig(max_tokens=256)
DEMO_DOCUMENTS = {"train": 240, "validation": 48, "test": 16}
DEMO_RECALL_SHARE = 3
FITTED_ON, CALIBRATED_ON = (
    "the translator was fitted on its document",
    "the gate was calibrated on its document",
)
DEMO_TEXTS = str(demo.texts("train").parent)


def loaded(names: Sequence[str], device: str) -> list[Model]:
    """Models of a command, on a device that exists; none is loaded where another cannot be."""
    check_models(names, device)
    return [kvbridge.load(name, device=device) for name in names]


def one_by_one(names: Sequence[str], device: str) -> list[Model]:
    """Models in the device's dtype that never share it: each is moved to host memory before the next is loaded."""
    check_models(names, device)
    found = []
    for name in names:
        found += loaded([name], device)
        found[-1].model.to("cpu")
    return found


def run_demo(out: Path, items: int, latency: bool, as_json: bool) -> None:
    """`kvbridge demo`."""
    check_out(out)
    start = time.perf_counter()
    sender, receiver = loaded(["demo:sender", "demo:receiver"], "cpu")
    texts = [d for split, count in DEMO_DOCUMENTS.items() for d in demo_documents(split, count)]
    fitted = fitted_asset(
        sender, receiver, texts, out, DEMO_CONFIG, say=say, progress=progress_of("fit")
    )
    found, excluded = make_items(demo_rows("test"), sender, receiver, limit=items)
    asked, left = make_items(
        demo_rows("recall"), sender, receiver, limit=max(2, items // DEMO_RECALL_SHARE)
    )
    summary = run_pair(
        sender,
        receiver,
        fitted,
        [*found, *asked],
        out,
        RunConfig(
            command="kvbridge demo",
            progress=counted("items"),
            processes=min(2, os.cpu_count() or 1),
        ),
        excluded=[*excluded, *left],
    )
    say(f"{time.perf_counter() - start:.0f} s in all; report: {out / RUN_REPORT}")
    if not as_json:
        show(summary, False)
    if latency:
        bridge = kvbridge.Bridge(fitted.asset, sender=sender, receiver=receiver)
        rows = measure_latency(
            bridge, longest_text(receiver, [r.body["text"] for r in demo_rows("test")], 2048)
        )
        summary = {
            **summary,
            "latency": [r.to_json() for r in rows],
            "break_even_tokens": break_even(rows),
        }
        if not as_json:
            show_latency(rows)
    if as_json:
        emit(summary)


def demo_documents(split: str, count: int) -> list[Document]:
    """The first documents of one of the demo's splits."""
    path = demo.texts(split)
    found = itertools.islice(read_documents(str(path)), count)
    return [replace(document, split=split) for document in found]


def run_fit(
    sender: str,
    receiver: str,
    data: str | None,
    out: Path,
    config: FitConfig,
    device: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """`kvbridge fit`."""
    source = data or DEMO_TEXTS
    if sender == receiver:
        raise UsageError("sender and receiver are the same model: its cache needs no translation")
    if not dry_run:
        check_out(out, new="assets")
        check_data(source)
        check_spill(config.spill_folder)
    ours, theirs = (one_by_one if config.one_at_a_time else loaded)([sender, receiver], device)
    plan = plan_memory(ours.geometry, theirs.geometry, config, torch.device(device))
    if dry_run:
        if as_json:
            emit(
                {
                    **vars(plan),
                    "peak_bytes": plan.peak_bytes,
                    "fits": plan.peak_bytes <= plan.budget_bytes,
                }
            )
        else:
            print("\n".join(plan.lines()))
        check_memory(ours.geometry, theirs.geometry, config, torch.device(device))
        return
    done = kvbridge.fit(
        ours,
        theirs,
        source,
        config=config,
        device=device,
        progress=progress_of("fit"),
        on_plan=lambda p: say("; ".join(p.lines())),
    )
    digest = save_asset(done, out)
    say(fit_line(done))
    scores = done.scores.to_json()
    if as_json:
        emit(
            {
                "asset": str(out),
                "digest": digest,
                "timings": done.timings,
                "scores": scores,
                "marks": list(done.marks),
            }
        )
        return
    control = scores["token_only"]
    columns = (
        scores["k_r2"],
        control["k_r2"],
        scores["v_r2"],
        control["v_r2"],
        scores["attention_cosine"],
    )
    rows = [
        [str(layer), *map(_three, values)]
        for layer, *values in zip(scores["layers"], *columns, strict=True)
    ]
    names = ["receiver layer", "K R²", "token-only", "V R²", "token-only", "attention cosine"]
    table(f"{sender} → {receiver}, held-out scores", names, rows)
    for mark in done.marks:
        say(mark)
    print(f"{out}: digest {digest}")


def run_eval(
    path: Path,
    data: str | None,
    out: Path,
    conditions: tuple[str, ...] | None,
    tasks: tuple[str, ...] | None,
    limit: int | None,
    controls: Path | None,
    gate_of: str | None,
    names: tuple[str | None, str | None],
    device: str,
    processes: int,
    as_json: bool,
) -> None:
    """`kvbridge eval run`."""
    if unknown := [c for c in conditions or () if c not in CONDITIONS and parsed(c) is None]:
        raise UsageError(
            unknown_names(
                "conditions", unknown, CONDITIONS, " (or another tail, as translated_tail17)"
            )
        )
    if unknown := [t for t in tasks or () if t not in TASKS]:
        raise UsageError(unknown_names("tasks", unknown, TASKS))
    check_out(out)
    if data is not None:
        check_data(data)
    asset = load_asset(path)
    check_controls(asset, controls)
    if gate_of is not None and conditions is not None and "gated" not in conditions:
        conditions = (*conditions, "gated")
    gate, plan = (
        gate_for(asset, gate_of)
        if gate_of is not None or "gated" in (conditions or ())
        else (None, None)
    )
    if conditions is not None:
        conditions = with_references(conditions, *(p.tail for p in plans_of(gate, plan)))
    raws = [*demo_rows("test"), *demo_rows("recall")] if data is None else list(read_raw(data))
    known = known_to(asset, gate)
    if data is not None and asset.manifest.fitted_on is None:
        say(
            "this asset does not say which documents it was fitted on: see to it that these texts are others"
        )
    if raws and all(seen := [known(raw.document) for raw in raws]):
        why = " or ".join(sorted({reason for reason in seen if reason}))
        raise UsageError(
            f"of every document of these texts it is known that {why}; give other texts with --data"
        )
    check_run(out, asset.digest, data_digest(raws))
    sender, receiver = models_of(asset, names, device)
    items, excluded = make_items(raws, sender, receiver, limit=limit, tasks=tasks, known=known)
    if gate is not None and processes > 1:
        say("a gate runs in one process: --processes is not used")
    summary = run_pair(
        sender,
        receiver,
        Fitted(asset, None),
        items,
        out,
        RunConfig(
            command=" ".join(["kvbridge", *sys.argv[1:]]),
            conditions=conditions,
            gate=gate,
            plan=plan,
            controls=controls,
            progress=counted("items"),
            processes=processes,
            data=data_digest(raws),
        ),
        excluded=excluded,
    )
    say(f"report: {out / RUN_REPORT}")
    show(summary, as_json)


def known_to(asset: Asset, gate: Gate | None) -> Callable[[str], str | None]:
    """Why nothing may be judged on a document, by its name: the translator or the gate was made of it; None elsewhere."""
    calibration = gate.calibration if isinstance(gate, CalibratedGate) else None

    def known(document: str) -> str | None:
        if asset.manifest.knows(document):
            return FITTED_ON
        return CALIBRATED_ON if calibration is not None and calibration.knows(document) else None

    return known


def gate_for(asset: Asset, given: str | None) -> tuple[Gate, RepairPlan | None]:
    """A gate that looks at nothing, or the calibration in the folder `given` (default: ASSET.gate) with its first repair plan.
    Raises EvalError for a ladder whose plans differ in more than their tail."""
    if given in FIXED_GATES:
        return FIXED_GATES[given], None
    where = Path(given) if given is not None else CALIBRATION.beside(asset.path)
    if not where.is_dir():
        raise UsageError(
            f"no calibration stands at {where}: run kvbridge gate calibrate, or give --gate {', '.join(FIXED_GATES)} or a folder"
        )
    found = load_calibration(where, asset)
    check_alike([rung.plan for rung in found.rungs])
    return CalibratedGate(found), found.rungs[0].plan


def run_screen(
    names: Sequence[str],
    data: str | None,
    out: Path,
    items: int,
    config: FitConfig,
    predict_only: bool,
    latency: bool,
    device: str,
    processes: int,
    as_json: bool,
) -> None:
    """`kvbridge screen`."""
    check_fleet(names)
    check_out(out)
    check_models(names, device)
    if data is None:
        given = FleetData(
            list(read_documents(DEMO_TEXTS)), [*demo_rows("test"), *demo_rows("recall")]
        )
    else:
        given = screen_data(data, config.fractions)
    models = loaded(names, device)
    result = screen(
        models,
        given,
        out,
        ScreenConfig(
            fit=config,
            items=items,
            command=" ".join(["kvbridge", *sys.argv[1:]]),
            predict_only=predict_only,
            latency=latency,
            processes=processes,
        ),
        say=say,
        progress=counted("items"),
    )
    say(f"report: {out / RUN_REPORT}")
    if as_json:
        emit(result)
    else:
        show_screening(result)
    if not predict_only and all(row["verdict"] is None for row in result["pairs"]):
        raise EvalError(f"no pair could be measured: {result['pairs'][0]['reason']}")


def show_screening(result: dict[str, Any]) -> None:
    """A screening for people: outcomes, predictors, and how these are related where pairs suffice."""
    Console().print(screening_table(result))
    predicted = sorted({name for row in result["pairs"] for name in row["predictors"]})
    table(
        f"before fitting, from {SEQUENCES} sequences",
        ["pair", *predicted],
        [
            [
                f"{row['sender']} → {row['receiver']}",
                *(_three(row["predictors"].get(name)) for name in predicted),
            ]
            for row in result["pairs"]
        ],
    )
    related = result["correlation_with_recovery"]
    say(
        f"correlation of predictors with recovery: {related['refused']}"
        if "refused" in related
        else json.dumps(related)
    )


def models_of(asset: Asset, names: tuple[str | None, str | None], device: str) -> list[Model]:
    """The pair an asset was fitted for, from where its manifest (or the caller) says it lies. Raises UsageError where a
    model there is another one."""
    sides = (asset.manifest.sender, asset.manifest.receiver)
    places = []
    for name, geometry in zip(names, sides, strict=True):
        where = name or geometry.model_id
        places.append(
            f"{where}@{geometry.commit}"
            if geometry.commit and name is None and "@" not in where
            else where
        )
    check_models(places, device)
    found = []
    for role, at, name, geometry in zip(("sender", "receiver"), places, names, sides, strict=True):
        dtype = getattr(torch, geometry.dtype)
        model = kvbridge.load(at, device=device, dtype=dtype)
        if model.geometry.digest != geometry.digest:
            raise UsageError(
                f"{asset.path} was fitted for {geometry.model_id} as its {role}, {name or geometry.model_id} differs in "
                f"{difference(geometry, model.geometry)}; name the model it was fitted for (--{role})"
            )
        found.append(model)
    return found


def show(summary: dict[str, Any], as_json: bool) -> None:
    """A summary for people or machines."""
    if as_json:
        emit(summary)
    else:
        Console().print(Terminal(summary))


def show_latency(rows: list[Latency]) -> None:
    """Prints handoff against prefill."""
    at = break_even(rows)
    table(
        "time to the first token: handoff (translate, repair, last token) against prefill",
        ["prompt tokens", "handoff ms", "prefill ms", "prefill ÷ handoff", "FLOPs share"],
        [
            [
                str(r.tokens),
                f"{r.handoff_ms:.1f}",
                f"{r.prefill_ms:.1f}",
                f"{r.ratio:.2f}",
                f"{r.flops_share:.2f}",
            ]
            for r in rows
        ],
    )
    print(f"break-even: {'never at these lengths' if at is None else f'{at} tokens'}")


def _three(value: float | None) -> str:
    """A number with three decimals, a dash where there is none."""
    return "–" if value is None else f"{value:.3f}"
