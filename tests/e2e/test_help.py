"""Every command explains itself: what it does in a sentence, and every option and argument."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import chats, coverage
from benchmarks import registry as store_benchmark
from benchmarks.faults.__main__ import app as faults
from benchmarks.gates.__main__ import app as gate_study
from kvbridge.cli.main import app
from recipes.demo.__main__ import app as demo_recipe
from recipes.thirdparty.__main__ import app as thirdparty

PROGRAMS = {
    "kvbridge": app,
    "benchmarks.chats": chats.app,
    "benchmarks.coverage": coverage.app,
    "benchmarks.faults": faults,
    "benchmarks.gates": gate_study,
    "benchmarks.registry": store_benchmark.app,
    "recipes.demo": demo_recipe,
    "recipes.thirdparty": thirdparty,
}


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """A program's groups and commands, by the words that are typed."""
    yield name, command
    for word, inner in getattr(command, "commands", {}).items():
        yield from commands(f"{name} {word}", inner)


EVERY = dict(
    pair
    for name, program in PROGRAMS.items()
    for pair in commands(name, typer.main.get_command(program))
)


@pytest.mark.parametrize("words", EVERY)
def test_a_command_says_what_it_does_and_what_every_option_is(words: str) -> None:
    command = EVERY[words]
    first = (command.help or "").strip().split("\n\n")[0]
    assert first.endswith((".", "`.")), first
    assert len(first) > 20
    for parameter in command.params:
        assert parameter.help, f"{words}: {parameter.name} has no help"
        assert parameter.help.endswith("."), parameter.help


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_help_of_a_program_can_be_shown(name: str) -> None:
    for words in EVERY:
        if words.split()[0] == name:
            shown = CliRunner().invoke(PROGRAMS[name], [*words.split()[1:], "--help"])
            assert shown.exit_code == 0, words


def test_commands_stand_in_the_order_in_which_they_are_used() -> None:
    help_text = CliRunner().invoke(app, ["--help"]).stdout
    order = [
        f"│ {name} " for name in ("demo", "screen", "fit", "verify", "eval", "gate", "registry")
    ]
    places = [help_text.index(name) for name in order]
    assert places == sorted(places)
