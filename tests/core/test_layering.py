"""Who may import whom: stated once, here, and read from every import statement of every source
file.

An import inside a function counts like one at the top of its file, and so does one under
TYPE_CHECKING: a circle stays a circle when it is lazy. The package's own `__init__` is the
exception, for it imports public names on first use.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = (
    "moved",
    "errors",
    "clock",
    "format",
    "files",
    "codec",
    "headers",
    "geometry",
    "duplicates",
    "demo",
    "model",
    "cache",
    "asset",
    "engines",
    "handoff",
)
"""Rooms of `kvbridge/`; each may import itself and those before it."""
BRANCHES = ("fitting", "gates", "registry")
"""Each may import the core and itself, never another branch."""
TOP = ("eval", "cli")
"""`eval` may import the core and all branches, `cli` everything; nothing below imports them."""
OUTSIDE = ("benchmarks", "recipes", "tests", "examples")
"""Not installed: they may import the package, which may not import them."""
INSIDE = {
    "gates": ("signals", "labels", "decide", "calibrate"),
    "registry": ("store", "hub"),
    "eval": ("tasks", "conditions", "run", "statistics", "report", "pair", "screen"),
}
"""Folders (or modules) of a branch; each may import itself and those before it."""
LIGHT = (
    "errors",
    "format",
    "files",
    "codec",
    "headers",
    "geometry",
    "asset.manifest",
    "cache.provenance",
    "handoff.decision",
)
"""Stores and the command line read these without loading torch."""


def room_of(module: str) -> str:
    return module.split(".")[0]


def sources() -> dict[str, Path]:
    """Module name without `kvbridge.` → its file."""
    modules = {}
    for folder in ("kvbridge", *BRANCHES, "eval"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder)
            if any(
                (ROOT / folder / parent).is_symlink() for parent in inside.parents if parent.name
            ):
                continue
            parts = inside.with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            name = ".".join(parts if folder == "kvbridge" else (folder, *parts))
            if name:
                modules[name] = path
    return modules


SOURCES = sources()


def imported(tree: ast.Module) -> set[str]:
    """Modules of kvbridge that a file imports, anywhere in it and under whichever spelling, without
    the prefix; "" is the package itself."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            module = node.module or ""
            names |= {
                whole
                if (whole := f"{module}.{alias.name}").removeprefix("kvbridge.") in SOURCES
                else module
                for alias in node.names
            }
    inside = {n for n in names if n == "kvbridge" or n.startswith("kvbridge.")}
    assert not {room_of(n) for n in names - inside} & {*OUTSIDE, *BRANCHES, "eval"}
    return {n.removeprefix("kvbridge").removeprefix(".") for n in inside}


IMPORTS = {name: imported(ast.parse(path.read_text("utf-8"))) for name, path in SOURCES.items()}


def in_order(importer: str, target: str) -> bool:
    """Whether two modules of one branch stand in the branch's own order."""
    branch, *inner = importer.split(".")
    inner_target = target.split(".")[1:]
    if branch not in INSIDE or not inner or not inner_target:
        return True
    order = INSIDE[branch]
    return order.index(inner_target[0]) <= order.index(inner[0])


def allowed(importer: str, target: str) -> bool:
    importing, imported_room = room_of(importer), room_of(target)
    if importing == imported_room:
        return in_order(importer, target)
    if importing == "cli":
        return True
    if importing == "eval":
        return imported_room in (*CORE, *BRANCHES)
    if importing in BRANCHES:
        return imported_room in CORE
    return imported_room in CORE[: CORE.index(importing)]


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_one_way(module):
    assert room_of(module) in (*CORE, *BRANCHES, *TOP), f"{module} is in no room"
    for target in IMPORTS[module]:
        assert target or room_of(module) == "cli", f"{module} imports the package: name the module"
        assert allowed(module, target), f"{module} may not import {target}"


def test_no_circle_inside_a_room_or_between_two():
    TopologicalSorter(IMPORTS).prepare()


def test_the_rule_can_fail():
    assert allowed("handoff.bridge", "errors")
    assert not allowed("errors", "handoff.bridge")
    assert not allowed("cache.snapshot", "asset.manifest")
    assert not allowed("fitting.job", "gates.decide.policy")
    assert not allowed("registry.store.store", "eval.run.rows")
    assert not allowed("handoff.bridge", "fitting.job")
    assert not allowed("eval.run.evaluate", "cli.main")
    assert allowed("eval.run.evaluate", "gates.decide.policy")
    assert allowed("fitting.job", "fitting.data")
    assert allowed("eval.report.page", "eval.run.rows")
    assert not allowed("eval.run.evaluate", "eval.report.page")
    assert not allowed("eval.report.page", "eval.pair")
    assert allowed("eval.screen.fleet", "eval.pair")
    assert not allowed("registry.store.store", "registry.hub.push")
    assert not allowed("gates.signals.reading", "gates.decide.policy")
    lazy = """def f():
    from kvbridge.handoff import bridge
    import kvbridge.errors
    from kvbridge import Bridge
"""
    assert imported(ast.parse(lazy)) == {"handoff.bridge", "errors", ""}
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()


def test_every_room_exists():
    assert {room_of(m) for m in SOURCES} == {*CORE, *BRANCHES, *TOP}
    for branch, order in INSIDE.items():
        inner = {m.split(".")[1] for m in SOURCES if m.startswith(f"{branch}.")}
        assert inner == set(order)


class Running(ast.NodeTransformer):
    """Drops what only a type checker reads: a name in an annotation loads nothing."""

    def visit_If(self, node: ast.If) -> ast.If | None:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else node


def test_only_what_runs_counts_as_loaded():
    lazy = "if TYPE_CHECKING:\n    import torch\nif other:\n    import numpy\n"
    assert ast.unparse(Running().visit(ast.parse(lazy))) == "if other:\n    import numpy"


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_load_nothing_heavy(name):
    """Themselves and all that they import."""
    pending, seen = [name], set()
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        pending += IMPORTS[module]
        tree = Running().visit(ast.parse(SOURCES[module].read_text("utf-8")))
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not {n.split(".")[0] for n in names} & {
            "torch",
            "transformers",
            "numpy",
            "datasets",
        }, module
