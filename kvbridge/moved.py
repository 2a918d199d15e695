"""Old names of modules: each still imports, with a warning that says where the module stands now.

Before every module had its room, most stood flat in their folder. Whoever imported one of these by its
old name gets the same module under the new one; the old names go with the next minor release.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "align": "cache.align",
    "bridge": "handoff.bridge",
    "card": "asset.card",
    "contract": "handoff.stages.check",
    "cost": "handoff.cost",
    "digests": "model.digests",
    "entries": "asset.entries",
    "eval.bootstrap": "eval.statistics.bootstrap",
    "eval.charts": "eval.report.charts",
    "eval.chosen": "eval.tasks.chosen",
    "eval.display": "eval.report.display",
    "eval.fixed_gates": "eval.conditions.fixed_gates",
    "eval.fleet_report": "eval.screen.report",
    "eval.gated": "eval.statistics.gated",
    "eval.items": "eval.tasks.items",
    "eval.latency": "eval.run.latency",
    "eval.plans": "eval.conditions.names",
    "eval.routing": "eval.statistics.routing",
    "eval.rows": "eval.run.rows",
    "eval.screen_data": "eval.screen.data",
    "eval.screening": "eval.screen.verdicts",
    "eval.setup": "eval.conditions.setup",
    "eval.similarity": "eval.screen.similarity",
    "eval.start": "eval.tasks.start",
    "eval.summary": "eval.report.summary",
    "eval.table": "eval.statistics.table",
    "eval.verdict": "eval.statistics.verdict",
    "eval.workers": "eval.run.workers",
    "evidence": "handoff.evidence",
    "features": "cache.features",
    "gates.attention": "gates.signals.attention",
    "gates.audit": "gates.decide.audit",
    "gates.calibration": "gates.decide.calibration",
    "gates.config": "gates.calibrate.config",
    "gates.continuing": "gates.labels.continuing",
    "gates.costs": "gates.signals.costs",
    "gates.evaluate": "gates.calibrate.evaluate",
    "gates.extras": "gates.signals.extras",
    "gates.guarantee": "gates.decide.guarantee",
    "gates.items": "gates.calibrate.items",
    "gates.levels": "gates.calibrate.levels",
    "gates.outcomes": "gates.labels.outcomes",
    "gates.passing": "gates.calibrate.passing",
    "gates.policy": "gates.decide",
    "gates.reading": "gates.signals.reading",
    "gates.score": "gates.decide.score",
    "gates.sealed": "gates.decide.sealed",
    "gates.timing": "gates.decide.timing",
    "leverage": "asset.leverage",
    "licence": "model.licence",
    "manifest": "asset.manifest",
    "models": "model.load",
    "prefill": "cache.prefill",
    "probe": "model.probe",
    "provenance": "cache.provenance",
    "queries": "model.attention",
    "registry.admission": "registry.store.admission",
    "registry.catalog": "registry.store.catalog",
    "registry.collect": "registry.store.collect",
    "registry.disk": "registry.store.disk",
    "registry.evaluation": "registry.hub.evaluation",
    "registry.finite": "registry.store.finite",
    "registry.interchange": "registry.hub.interchange",
    "registry.kinds": "registry.store.kinds",
    "registry.naming": "registry.store.naming",
    "registry.publishing": "registry.store.publishing",
    "registry.records": "registry.store.records",
    "registry.refs": "registry.store.refs",
    "registry.signing": "registry.store.signing",
    "registry.stream": "registry.store.stream",
    "repair": "handoff.plan",
    "request": "handoff.request",
    "rope": "model.rope",
    "snapshot": "cache.snapshot",
    "snapshot_file": "cache.snapshot_file",
    "translator": "asset.maps.translator",
}
"""Old name → new name, both without `kvbridge.`."""


class _Redirect(Loader):
    """Gives the module that stands at `target`, as it is."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self.target)
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just given the module the old name's spec: it keeps its own.
        module.__spec__ = self.own_spec


class OldNames(MetaPathFinder):
    """Finds modules of MOVED under their old names, after every other finder has been asked."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = MOVED.get(fullname.removeprefix("kvbridge."))
        if new is None or not fullname.startswith("kvbridge."):
            return None
        message = f"{fullname} is kvbridge.{new} now; the old name goes with the next minor release"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return ModuleSpec(fullname, _Redirect(f"kvbridge.{new}"))


def install() -> None:
    """Makes the old names importable; once for a process."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.append(OldNames())
