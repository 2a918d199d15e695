"""What the README and docs/life-of-a-request.md show is run, and the commands of the README exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbridge.handoff import stages
from kvbridge.handoff.decision import REASONS

README = Path(__file__).parents[2] / "README.md"
ORDER = ["check", "align", "features", "translate", "rotate", "repair", "judge", "assemble"]
LIFE = README.parent / "docs" / "life-of-a-request.md"


def blocks(language: str, page: Path = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


def test_the_example_comes_soon_and_the_terms_before_the_first_table() -> None:
    lines = README.read_text("utf-8").splitlines()
    assert lines.index("```") < 25
    first_table = next(number for number, line in enumerate(lines) if line.startswith("|"))
    assert sum(line.startswith("- **") for line in lines[:first_table]) == 6


def test_the_library_example_and_the_walk_run_and_print_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = blocks("python")
    assert (
        len([line for line in example.splitlines() if line.strip() and not line.startswith("#")])
        <= 14
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(example, str(README), "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    shown = blocks("text")[0].splitlines()
    assert printed[-3:-1] == shown[:2], (
        "decision and fidelity; words differ from machine to machine"
    )
    handoff = names["handoff"]
    assert handoff.decision.verdict == "use_approximate"  # type: ignore[attr-defined]
    assert handoff.provenance.fidelity == "approximate"  # type: ignore[attr-defined]
    assert handoff.cached == len(handoff.ids) - 1  # type: ignore[attr-defined]

    (walk,) = blocks("python", LIFE)
    exec(compile(walk, str(LIFE), "exec"), {})
    assert capsys.readouterr().out == blocks("text", LIFE)[-1]


def test_the_life_of_a_request_names_every_stage_and_only_reasons_that_exist() -> None:
    table = re.findall(
        r"^\| `(\w+)` \| .* \| (.*) \| .* \|$", LIFE.read_text("utf-8"), re.MULTILINE
    )
    assert [stage for stage, _ in table] == [stage for stage in ORDER if stage in stages.__all__]
    assert len(table) == len(stages.__all__) - 1, "all but replan, which is no stage"
    for _, refusals in table:
        assert set(re.findall(r"`(\w+)`", refusals)) <= set(REASONS)


def test_every_command_of_the_readme_exists() -> None:
    from kvbridge.cli.main import app

    text = "\n".join([*blocks("sh"), *blocks("")])
    commands = set(re.findall(r"^kvbridge ((?:eval |registry |gate )?[a-z]+)", text, re.MULTILINE))
    assert {"demo", "fit", "eval run", "screen", "verify"} <= commands
    for command in commands:
        shown = CliRunner().invoke(app, [*command.split(), "--help"])
        assert shown.exit_code == 0, command
