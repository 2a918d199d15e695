"""What an option may be: plain numbers are refused before torch is imported, unknown names with the
nearest known one."""

from __future__ import annotations

import subprocess
import sys

import pytest

RUN = (
    "import sys; from kvbridge.cli.main import main\ntry: main()\nfinally: print('torch' in "
    "sys.modules)"
)

NUMBERS = [
    (("gate", "calibrate", "a", "--alpha", "0"), "--alpha"),
    (("gate", "calibrate", "a", "--alpha", "nan"), "--alpha"),
    (("gate", "calibrate", "a", "--lenient", "1"), "--lenient"),
    (("gate", "calibrate", "a", "--delta", "-0.1"), "--delta"),
    (("gate", "calibrate", "a", "--tau", "-1"), "--tau"),
    (("fit", "a", "b", "--out", "x", "--layers", "0"), "--layers"),
    (("fit", "a", "b", "--out", "x", "--max-tokens", "0"), "--max-tokens"),
    (("fit", "a", "b", "--out", "x", "--stride", "0"), "--stride"),
    (("fit", "a", "b", "--out", "x", "--batch-tokens", "-1"), "--batch-tokens"),
    (("screen", "a", "b", "--layers", "0"), "--layers"),
    (("screen", "a", "b", "--max-tokens", "0"), "--max-tokens"),
]

NAMES = [
    (
        ("eval", "run", "a", "--conditions", "native,transalted"),
        "transalted; did you mean translated?",
    ),
    (("eval", "run", "a", "--tasks", "recal"), "recal; did you mean recall?"),
    (
        ("fit", "a", "b", "--out", "x", "--family", "full-heads"),
        "full-heads; did you mean full-head?",
    ),
    (("fit", "a", "b", "--out", "x", "--selection", "topk"), "topk; did you mean top-k?"),
]


def refused(arguments: tuple[str, ...]) -> tuple[str, str]:
    """What is printed on stdout and the one line on stderr of a command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvbridge: ")
    return done.stdout.strip(), line


@pytest.mark.parametrize(
    ("arguments", "option"), NUMBERS, ids=[" ".join(a[:1] + a[-2:]) for a, _ in NUMBERS]
)
def test_a_plain_number_is_checked_before_torch_is_imported(
    arguments: tuple[str, ...], option: str
) -> None:
    imported, line = refused(arguments)
    assert option in line
    assert imported == "False"


@pytest.mark.parametrize(("arguments", "words"), NAMES, ids=[a[-1] for a, _ in NAMES])
def test_an_unknown_name_is_told_with_the_nearest(arguments: tuple[str, ...], words: str) -> None:
    _, line = refused(arguments)
    assert line.endswith(words)
