"""The wheel holds everything once, only under kvbridge/, and works alone in a fresh environment."""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
import venv
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "kvbridge": ROOT / "kvbridge",
    **{f"kvbridge/{n}": ROOT / n for n in ("fitting", "gates", "registry", "eval")},
}
DATA = (
    ".safetensors",
    ".json",
    ".jsonl",
    ".md",
    ".jinja",
    ".html",
    ".css",
    ".js",
    ".txt",
    ".typed",
    ".yaml",
)


def tracked() -> set[str]:
    """Files that git tracks or would add; everything where this is no checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        return {p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*") if p.is_file()}
    return set(listed.stdout.splitlines())


def expected_files() -> set[str]:
    """Paths in the wheel of every .py and data file on disk, under its name as part of kvbridge."""
    known, files = tracked(), set()
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*"):
            if path.is_file() and not any(
                part.is_symlink() for part in path.relative_to(folder).parents if str(part) != "."
            ):
                inside = path.relative_to(folder)
                if folder == ROOT / "kvbridge" and (folder / inside.parts[0]).is_symlink():
                    continue
                if (
                    path.relative_to(ROOT).as_posix() in known
                    and path.suffix in (".py", *DATA)
                    and not path.name.startswith(".")
                ):
                    files.add(f"{package}/{inside.as_posix()}")
    return files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the tracked files, so that nothing lying about gets in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in sorted(tracked()):
        path, copy = ROOT / name, source / name
        if name.startswith(
            (
                *(f"{f}/" for f in ("kvbridge", "fitting", "gates", "registry", "eval")),
                "pyproject",
                "README",
                "LICENSE",
            )
        ):
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                copy.symlink_to(path.readlink())
            elif path.is_file():
                copy.write_bytes(path.read_bytes())
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(out),
            str(source),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (built,) = out.glob("*.whl")
    return built


def test_every_package_on_disk_is_named():
    with (ROOT / "pyproject.toml").open("rb") as file:
        setuptools = tomllib.load(file)["tool"]["setuptools"]
    on_disk = {
        name.removesuffix("/__init__.py").replace("/", ".")
        for name in expected_files()
        if name.endswith("/__init__.py")
    }
    assert set(setuptools["packages"]) == on_disk
    for package, folder in setuptools["package-dir"].items():
        assert (ROOT / folder / "__init__.py").is_file(), package
    modules = {
        name.rpartition("/")[0].replace("/", ".")
        for name in expected_files()
        if name.endswith(".py")
    }
    assert modules <= on_disk, "folders of modules without __init__.py"


def test_the_wheel_holds_everything_once_and_only_under_kvbridge(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert [n for n, count in Counter(names).items() if count > 1] == []
    assert [n for n in names if not n.startswith("kvbridge/") and ".dist-info/" not in n] == []
    inside = {n for n in names if n.startswith("kvbridge/")}
    assert expected_files() - inside == set()
    assert {n for n in inside if n.endswith(".py")} - expected_files() == set()
    for needed in (
        "kvbridge/demo/models/receiver/model.safetensors",
        "kvbridge/demo/models/receiver/tokenizer.json",
        "kvbridge/demo/texts/train.jsonl",
        "kvbridge/py.typed",
    ):
        assert needed in inside


def test_it_loads_a_demo_model_alone_and_offline(wheel, tmp_path):
    """A fresh environment that sees this one's third-party packages, but no checkout of
    kvbridge."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.check_output([str(python), "-c", where], text=True).strip())
    here = Path(subprocess.check_output([sys.executable, "-c", where], text=True).strip())
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "heavy.pth").write_text(f"{here}\n")
    code = (
        "import sys, time; start = time.perf_counter(); import kvbridge; model = "
        "kvbridge.load('demo:receiver');"
        "print(kvbridge.__file__); print(time.perf_counter() - start); "
        "print(len(model.encode('Hello there.')));"
        "import kvbridge.fitting.job, kvbridge.registry, kvbridge.gates, kvbridge.eval;"
        "print([m for m in ('fitting', 'gates', 'registry', 'eval') if m in sys.modules])"
    )
    start = time.perf_counter()
    ran = subprocess.run(
        [str(python), "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={
            "HF_HUB_OFFLINE": "1",
            "HOME": str(tmp_path),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert ran.returncode == 0, ran.stderr
    where_from, seconds, tokens, leaked = ran.stdout.splitlines()[-4:]
    assert Path(where_from).is_relative_to(site)
    assert int(tokens) > 0
    assert leaked == "[]"
    print(
        f"load from the wheel: {float(seconds):.2f} s, process {time.perf_counter() - start:.2f} s"
    )
