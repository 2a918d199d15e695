"""What `kvbridge eval run` does: check all that needs no model, then measure an asset."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvbridge.asset.folder import Asset, load_asset
from kvbridge.cli.checks import check_controls, check_out
from kvbridge.cli.interrupt import leaving, left_run
from kvbridge.cli.models import models_of
from kvbridge.cli.options import ModelOptions
from kvbridge.cli.output import say
from kvbridge.cli.progress import counted
from kvbridge.cli.show import show
from kvbridge.errors import UsageError, unknown_names
from kvbridge.eval.conditions.fixed_gates import FIXED_GATES
from kvbridge.eval.conditions.names import known_names, parsed, with_references
from kvbridge.eval.conditions.setup import check_alike, plans_of
from kvbridge.eval.pair import Fitted, run_pair
from kvbridge.eval.run.config import RunConfig
from kvbridge.eval.run.evaluate import check_run
from kvbridge.eval.tasks import TASKS
from kvbridge.eval.tasks.chosen import make_items
from kvbridge.eval.tasks.items import RawItem, data_digest, demo_rows, read_raw
from kvbridge.fitting.data import check_data
from kvbridge.fitting.skipped import Skipped
from kvbridge.format import CALIBRATION, RUN_REPORT
from kvbridge.gates.decide import CalibratedGate
from kvbridge.gates.decide.calibration import load_calibration
from kvbridge.handoff.plan import RepairPlan
from kvbridge.handoff.ports import Gate

FITTED_ON = "the translator was fitted on its document"
CALIBRATED_ON = "the gate was calibrated on its document"
KnownTo = Callable[[str], str | None]


@dataclass(frozen=True)
class EvalCommand:
    """What was asked for on the command line. `data` None: the demo's held-out texts; `conditions`
    and `tasks` None: all that apply; `gate`: a name of FIXED_GATES or a calibration's folder."""

    asset: Path
    out: Path
    data: str | None = None
    conditions: tuple[str, ...] | None = None
    tasks: tuple[str, ...] | None = None
    limit: int | None = None
    controls: Path | None = None
    gate: str | None = None
    models: ModelOptions = field(default_factory=ModelOptions)
    processes: int = 1
    as_json: bool = False


def run_eval(asked: EvalCommand) -> None:
    """Evaluates into a run folder and shows the summary; nothing is loaded where it would be in
    vain."""
    with leaving(lambda: left_run(asked.out)):
        _run(asked)


def _run(asked: EvalCommand) -> None:
    _check_names(asked)
    check_out(asked.out)
    if asked.data is not None:
        check_data(asked.data)
    asset = load_asset(asked.asset)
    check_controls(asset, asked.controls)
    conditions = asked.conditions
    if asked.gate is not None and conditions is not None and "gated" not in conditions:
        conditions = (*conditions, "gated")
    gate, plan = None, None
    if asked.gate is not None or "gated" in (conditions or ()):
        gate, plan = gate_for(asset, asked.gate)
    if conditions is not None:
        conditions = with_references(conditions, *(p.tail for p in plans_of(gate, plan)))
    raws = _raws(asked.data)
    known = known_to(asset, gate)
    if asked.data is not None and asset.manifest.fitted_on is None:
        say(
            "this asset does not say which documents it was fitted on: see to it that these texts "
            "are others"
        )
    _check_documents(raws, known)
    digest = data_digest(raws)
    check_run(asked.out, asset.digest, digest)
    sender, receiver = models_of(asset, asked.models)
    items, excluded = make_items(
        raws, sender, receiver, limit=asked.limit, tasks=asked.tasks, known=known
    )
    if gate is not None and asked.processes > 1:
        say("a gate runs in one process: --processes is not used")
    with counted("items") as progress:
        summary = run_pair(
            sender,
            receiver,
            Fitted(asset, None),
            items,
            asked.out,
            RunConfig(
                command=" ".join(["kvbridge", *sys.argv[1:]]),
                conditions=conditions,
                gate=gate,
                plan=plan,
                controls=asked.controls,
                progress=progress,
                processes=asked.processes,
                data=digest,
            ),
            excluded=excluded,
        )
    say(f"report: {asked.out / RUN_REPORT}")
    show(summary, asked.as_json)


def _check_names(asked: EvalCommand) -> None:
    """Raises UsageError for a condition or task that does not exist, with the nearest that does."""
    unknown = [c for c in asked.conditions or () if c not in known_names() and parsed(c) is None]
    if unknown:
        hint = " (or another tail, as translated_tail17)"
        raise UsageError(unknown_names("conditions", unknown, known_names(), hint))
    unknown = [t for t in asked.tasks or () if t not in TASKS]
    if unknown:
        raise UsageError(unknown_names("tasks", unknown, TASKS))


def _raws(data: str | None) -> list[RawItem]:
    if data is None:
        return [*demo_rows("test"), *demo_rows("recall")]
    return list(read_raw(data, Skipped(say)))


def _check_documents(raws: Sequence[RawItem], known: KnownTo) -> None:
    """Raises UsageError where nothing is left to judge on."""
    reasons = [known(raw.document) for raw in raws]
    if raws and all(reasons):
        why = " or ".join(sorted({reason for reason in reasons if reason}))
        raise UsageError(
            f"of every document of these texts it is known that {why}; give other texts with --data"
        )


def known_to(asset: Asset, gate: Gate | None) -> KnownTo:
    """Why nothing may be judged on a document, by its name: the translator or the gate was made of
    it; None elsewhere."""
    calibration = gate.calibration if isinstance(gate, CalibratedGate) else None

    def known(document: str) -> str | None:
        if asset.manifest.knows(document):
            return FITTED_ON
        if calibration is not None and calibration.knows(document):
            return CALIBRATED_ON
        return None

    return known


def gate_for(asset: Asset, given: str | None) -> tuple[Gate, RepairPlan | None]:
    """A gate that looks at nothing, or the calibration in the folder `given` (default: ASSET.gate)
    with its first repair plan. Raises EvalError for a ladder whose plans differ in more than their
    tail."""
    if given in FIXED_GATES:
        return FIXED_GATES[given], None
    where = Path(given) if given is not None else CALIBRATION.beside(asset.path)
    if not where.is_dir():
        raise UsageError(
            f"no calibration stands at {where}: run kvbridge gate calibrate, or give --gate "
            f"{', '.join(FIXED_GATES)} or a folder"
        )
    calibration = load_calibration(where, asset)
    check_alike([rung.plan for rung in calibration.rungs])
    return CalibratedGate(calibration), calibration.rungs[0].plan
