"""What the pages say exists: links, files, modules that code imports, commands, and every module in docs/modules.md."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from kvbridge.gates.signals import SIGNALS
from tests.core.test_layering import SOURCES

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
FENCE = re.compile(r"^[ \t]*```(\w*)\n(.*?)^[ \t]*```$", re.DOTALL | re.MULTILINE)
SOURCE = re.compile(
    r"`((?:kvbridge|fitting|gates|registry|eval|tests|benchmarks|recipes|docs)/[\w/.-]+)`"
)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_to_a_page_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        other = page.parent / path if path else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_that_a_page_names_exist(page):
    if page.name == "CHANGELOG.md":
        pytest.skip("it names files of other versions")
    # "One file, `…`" is a file that the reader is to make.
    named = re.sub(r"One file, `[^`]*`", "", page.read_text("utf-8"))
    for path in SOURCE.findall(named):
        assert (ROOT / path).exists(), path


def imports_of(code: str) -> list[tuple[str, str]]:
    """Module and name of every `from kvbridge… import …`."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    inside = [node for node in nodes if (node.module or "").partition(".")[0] == "kvbridge"]
    return [(str(node.module), alias.name) for node in inside for alias in node.names]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_code_imports_what_exists(page):
    for language, code in FENCE.findall(page.read_text("utf-8")):
        for module, name in imports_of(code) if language == "python" else []:
            whole = importlib.import_module(module)
            submodule = hasattr(whole, "__path__") and importlib.util.find_spec(f"{module}.{name}")
            assert hasattr(whole, name) or submodule, f"{module} has no {name}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_programs_that_a_page_runs_exist(page):
    if page.name == "CHANGELOG.md":
        pytest.skip("it names programs of other versions")
    for module in re.findall(
        r"python -m ((?:tests|benchmarks|recipes)[\w.]*)", page.read_text("utf-8")
    ):
        assert importlib.util.find_spec(module) is not None, module


def test_the_changelog_says_where_documented_names_are_now():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    moved = re.findall(r"^\| `(?:python -m )?[\w.]+`.* \| `([^`]+)`.* \|$", text, re.MULTILINE)
    assert len(moved) > 10
    for place in moved:
        program = place.removeprefix("python -m ").split()[0]
        module, _, name = (f"{program}." if place != program else place).rpartition(".")
        assert importlib.util.find_spec(module) is not None, place
        assert not name or hasattr(importlib.import_module(module), name), place


def test_the_gates_page_lists_every_signal_as_it_is():
    page = (ROOT / "docs" / "gates.md").read_text("utf-8").partition("### The signals\n")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .* \| (\w*) ?\| (\w+) \|$", page, re.MULTILINE)
    shown = {
        name: (tuple(re.findall(r"`(\w+)`", columns)), integrity == "yes", default == "yes")
        for name, columns, integrity, default in rows
    }
    assert shown == {
        name: (signal.columns, signal.integrity, signal.default) for name, signal in SIGNALS.items()
    }


def holds_code(path: Path) -> bool:
    """Whether a file has more than a docstring."""
    body = ast.parse(path.read_text("utf-8")).body
    return any(not isinstance(node, ast.Expr) for node in body)


def modules() -> list[str]:
    """Every module that holds code, as docs/modules.md names it."""
    names = [name for name, path in SOURCES.items() if holds_code(path)]
    for folder in ("benchmarks", "recipes"):
        for path in (ROOT / folder).rglob("*.py"):
            if holds_code(path):
                dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                names.append(dotted.removesuffix(".__init__"))
    return sorted(names)


def test_every_module_stands_in_its_page_once_and_nothing_else_does():
    page = (ROOT / "docs" / "modules.md").read_text("utf-8")
    listed = re.findall(r"^\| `([\w.]+)` \| .+ \|$", page, re.MULTILINE)
    assert sorted(set(listed)) == sorted(listed)
    apart = set(listed) ^ set(modules())
    assert not apart, f"docs/modules.md and the tree differ in {', '.join(sorted(apart))}"
