"""One pair from texts to a table: fit (or load) a translator, hand over held-out items, write the
run folder."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvbridge.asset.folder import Asset, load_asset, load_controls, save_asset
from kvbridge.codec import parse_json
from kvbridge.errors import CorruptFile
from kvbridge.eval.conditions.setup import Setup
from kvbridge.eval.report.finish import finish
from kvbridge.eval.run.config import RunConfig
from kvbridge.eval.run.evaluate import evaluate
from kvbridge.eval.run.workers import Recipe, Source, workers
from kvbridge.eval.tasks.chosen import Excluded
from kvbridge.eval.tasks.items import Item
from kvbridge.files import write_file
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.job import Fit, fit
from kvbridge.format import RUN_ASSET, RUN_FIT
from kvbridge.geometry import difference
from kvbridge.model.model import Model

Say = Callable[[str], None]


@dataclass(frozen=True)
class Fitted:
    """An asset on disk and what its fit took (None where it was not fitted here)."""

    asset: Asset
    timings: dict[str, float] | None


def fitted_asset(
    sender: Model,
    receiver: Model,
    texts: Any,
    out: Path,
    config: FitConfig,
    *,
    say: Say,
    progress: Any = None,
) -> Fitted:
    """The asset in `out/asset`: the one that stands there if it is of these models and this
    configuration, else a new fit."""
    path = out / RUN_ASSET
    if path.exists():
        asset = load_asset(path)
        manifest = asset.manifest
        for role, fitted, model in (
            ("sender", manifest.sender, sender),
            ("receiver", manifest.receiver, receiver),
        ):
            if fitted.digest != model.geometry.digest:
                raise CorruptFile(
                    f"{path}: an asset of other models stands here; its {role} is "
                    f"{fitted.model_id}, and {model.name} {difference(fitted, model.geometry)}; or "
                    "use another --out"
                )
        if manifest.body["config"] != config.to_json():
            raise CorruptFile(
                f"{path}: an asset of another configuration stands here; use another --out"
            )
        say(f"using the asset in {path}")
        return Fitted(asset, _read_timings(out))
    done = fit(
        sender,
        receiver,
        texts,
        config=config,
        progress=progress,
        on_plan=lambda plan: say("; ".join(plan.lines())),
    )
    say(fit_line(done))
    write_file(out / RUN_FIT, _json(done.timings))
    save_asset(done, path)
    return Fitted(load_asset(path), done.timings)


def fit_line(done: Fit) -> str:
    """Where the time of a fit went, in one line."""
    t = done.timings
    return (
        f"fitted in {t['total_s']:.1f} s = {t['ratio_to_forward']:.2f}× the two forward passes "
        f"(sender {t['forward_sender_s']:.1f} s, receiver {t['forward_receiver_s']:.1f} s, "
        f"moments {t['moments_s']:.1f} s, solve {t['solve_s']:.1f} s, "
        f"scores {t['scores_s']:.1f} s), {done.splits['train']['rows']:,} rows, "
        f"peak {t['peak_bytes'] / 2**30:.2f} GiB"
    )


def run_pair(
    sender: Model,
    receiver: Model,
    fitted: Fitted,
    items: Sequence[Item],
    out: Path,
    config: RunConfig,
    *,
    excluded: Sequence[Excluded] = (),
) -> dict[str, Any]:
    """Evaluates an asset into `out` and returns the summary; a cut run continues. `excluded` are
    rows that no item could be made of."""
    asset, gate, plan = fitted.asset, config.gate, config.plan
    controls = load_controls(asset, config.controls)
    setup = Setup.of(asset, controls, sender, receiver, gate=gate, plan=plan)
    meta = {
        "command": config.command,
        "versions": versions(),
        "timings": fitted.timings or {},
        "r2": _heat(asset),
        "attention_cosine": asset.manifest.scores["attention_cosine"],
        "predictors": dict(config.predictors),
    }
    with ExitStack() as stack:
        compute = None
        if config.processes > 1 and gate is None and receiver.device.type == "cpu":
            sources = (Source.of(sender), Source.of(receiver))
            recipe = Recipe(*sources, asset.path, config.controls, plan)
            compute = stack.enter_context(workers(recipe, config.processes))
        evaluate(setup, items, out, config=config, excluded=excluded, meta=meta, compute=compute)
    return finish(out, texts={item.id: item.prompt + " ⟶ " + item.answers[0] for item in items})


def versions() -> dict[str, str]:
    """Versions that figures depend on."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("kvbridge", "torch", "transformers")},
    }


def _heat(asset: Asset) -> list[list[float | None]] | None:
    """Single-layer validation R², mean of K and V, `[receiver layers][sender layers]`; None where
    nothing was scored."""
    tables = list(asset.manifest.scores["single_layer_r2"].values())
    if not tables:
        return None
    rows = []
    for layer in range(len(tables[0])):
        cells = [
            [t[layer][i] for t in tables if t[layer][i] is not None]
            for i in range(len(tables[0][layer]))
        ]
        rows.append([sum(c) / len(c) if c else None for c in cells])
    return rows


def _read_timings(out: Path) -> dict[str, float] | None:
    path = out / RUN_FIT
    timings = parse_json(path.read_bytes(), str(path)) if path.exists() else None
    return timings if isinstance(timings, dict) else None


def _json(body: Any) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()
