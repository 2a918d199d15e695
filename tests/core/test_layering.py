"""Who may import whom, read from the import statements themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = [
    "errors", "geometry", "files", "entries", "manifest", "card", "demo", "probe", "digests", "rope", "licence", "models", "align", "provenance",
    "snapshot_file", "snapshot", "prefill", "features", "queries", "repair", "translator", "leverage", "cost", "asset", "contract", "request",
    "handoff", "evidence", "bridge",
]  # fmt: skip
BRANCHES = ("fitting", "gates", "registry")
TOP = ("eval", "cli")
ENTRY_POINTS = ("eval.real",)  # run as a program of its own: like cli, it may import all and nothing imports it
SOURCES = {
    **{p.stem: p for p in sorted((ROOT / "kvbridge").glob("*.py")) if p.stem != "__init__"},
    **{
        ".".join((name, *p.relative_to(ROOT / name).with_suffix("").parts)): p
        for name in (*BRANCHES, "eval")
        for p in sorted((ROOT / name).rglob("*.py"))
    },
    **{f"demo.{p.stem}": p for p in sorted((ROOT / "kvbridge" / "demo").glob("*.py"))},
}


def imported(path: Path) -> set[str]:
    """Modules of kvbridge that a file imports, anywhere in it and under whichever spelling, without the prefix."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("kvbridge.") for alias in node.names if alias.name.startswith("kvbridge.")
            }
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "kvbridge":
                found |= {alias.name for alias in node.names}
            elif node.module.startswith("kvbridge."):
                found.add(node.module.removeprefix("kvbridge."))
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"{path}: relative import")
    return found


def layer_of(module: str) -> str:
    """`cli` for cli, its parts (cli_run, …) and other programs, else the first name."""
    first = module.split(".")[0]
    return "cli" if first == "cli" or first.startswith("cli_") or module in ENTRY_POINTS else first


def allowed(importer: str, target: str) -> bool:
    ours, theirs = layer_of(importer), layer_of(target)
    if ours == theirs:
        return True
    if ours == "cli":
        return True
    if theirs == "cli":
        return False
    if ours == "eval":
        return theirs in (*CORE, *BRANCHES)
    if ours in BRANCHES:
        return theirs in CORE
    return theirs in CORE and CORE.index(theirs) < CORE.index(ours)


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_one_way(module):
    assert layer_of(module) in (*CORE, *BRANCHES, *TOP), f"{module} has no place in the order: add it to CORE"
    for target in imported(SOURCES[module]):
        if target in ("__version__",) or layer_of(target) not in (*CORE, *BRANCHES, *TOP):
            # A public name taken from the package itself: only the outermost layers may.
            assert layer_of(module) in TOP, f"{module} imports {target} from the package itself"
            continue
        assert allowed(module, target), f"{module} may not import {target}"


def test_the_rule_can_fail():
    assert allowed("bridge", "errors")
    assert not allowed("errors", "bridge")
    assert not allowed("fitting.job", "gates.policy")
    assert not allowed("registry.store", "eval.rows")
    assert not allowed("bridge", "fitting.job")
    assert not allowed("eval.run", "cli")
    assert allowed("eval.run", "gates.policy")
    assert allowed("fitting.job", "fitting.data")
    assert allowed("cli_run", "cli")
    assert not allowed("eval.run", "eval.real")


def test_every_core_module_has_its_place():
    assert {"bridge", "rope", "demo.recipe", "fitting.job", "eval.rows"} <= set(SOURCES)
    assert set(CORE) <= {layer_of(m) for m in SOURCES}


@pytest.mark.parametrize("name", ["errors", "geometry", "files", "manifest", "provenance"])
def test_light_modules_name_no_heavy_import(name):
    tree = ast.parse(SOURCES[name].read_text("utf-8"))
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not {n.split(".")[0] for n in names} & {"torch", "transformers", "numpy", "datasets"}
