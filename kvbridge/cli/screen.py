"""What `kvbridge screen` does: measure every ordered pair of a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvbridge.cli.checks import check_models, check_out
from kvbridge.cli.fit import demo_texts
from kvbridge.cli.interrupt import leaving, left_fleet
from kvbridge.cli.models import loaded
from kvbridge.cli.options import ModelOptions
from kvbridge.cli.output import emit, say
from kvbridge.cli.progress import counted
from kvbridge.cli.show import show_screening
from kvbridge.errors import EvalError
from kvbridge.eval.screen.data import FleetData, screen_data
from kvbridge.eval.screen.fleet import ScreenConfig, check_fleet, screen
from kvbridge.eval.tasks.items import demo_rows
from kvbridge.fitting.data import read_documents
from kvbridge.format import RUN_REPORT


@dataclass(frozen=True)
class ScreenCommand:
    """What was asked for on the command line. `data` None: the demo's texts."""

    models: ModelOptions
    data: str | None
    out: Path
    config: ScreenConfig
    as_json: bool


def run_screen(asked: ScreenCommand) -> None:
    """Screens into a run folder and shows every pair; raises EvalError where none could be
    measured."""
    count = len(asked.models.names)
    with leaving(lambda: left_fleet(asked.out, count * (count - 1))):
        _run(asked)


def _run(asked: ScreenCommand) -> None:
    check_fleet([str(name) for name in asked.models.names])
    check_out(asked.out)
    check_models(asked.models)
    data = _data(asked)
    models = loaded(asked.models)
    with counted("items") as progress:
        result = screen(models, data, asked.out, asked.config, say=say, progress=progress)
    say(f"report: {asked.out / RUN_REPORT}")
    if asked.as_json:
        emit(result)
    else:
        show_screening(result)
    if not asked.config.predict_only and all(row["verdict"] is None for row in result["pairs"]):
        raise EvalError(f"no pair could be measured: {result['pairs'][0]['reason']}")


def _data(asked: ScreenCommand) -> FleetData:
    if asked.data is not None:
        return screen_data(asked.data, asked.config.fit.fractions)
    documents = list(read_documents(demo_texts()))
    return FleetData(documents, [*demo_rows("test"), *demo_rows("recall")])
