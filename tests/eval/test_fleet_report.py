"""The report of a screening: every pair with its controls, hostile names, and how it looks in a
browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbridge.eval.report.summary import summarise
from kvbridge.eval.run.rows import Row
from kvbridge.eval.screen.report import fleet_markdown, headline, render_fleet, write_fleet_report
from kvbridge.eval.screen.verdicts import Screened, screening_summary
from tests.eval.test_report import CHROMIUM, HOSTILE, check_looks, looked_at

MakeRows = Callable[..., list[Row]]


@pytest.fixture(scope="module")
def result(rows_of: MakeRows) -> dict[str, Any]:
    names = ["Org/Sender-135M-Instruct", "b", "c", HOSTILE]
    ordered = [(s, r) for s in names for r in names if s != r]
    rng = np.random.default_rng(0)
    pairs = []
    for index, (sender, receiver) in enumerate(ordered[:-1]):
        rows = rows_of(documents=12, seed=index, recovered={"translated": 0.6 + 0.03 * index})
        known = {"cka": 0.05 * index, "cca": float(rng.random())}
        pairs.append(
            Screened(sender, receiver, known, summarise(rows), 4_000_000, 600.0 if index else None)
        )
    return screening_summary(
        [*pairs, Screened(*ordered[-1], refused="share too few token ends " + "w" * 300)]
    )


def test_every_pair_stands_with_its_verdict_controls_and_predictors(result: dict[str, Any]) -> None:
    page, text = (
        render_fleet(result, "kvbridge screen b c"),
        fleet_markdown(result, "kvbridge screen b c"),
    )
    assert headline(result).startswith("12 ordered pairs: ")
    assert "4 × 3 = 12 ordered pairs" in page
    for words in (
        "Token-only map",
        "Wrong document",
        "CCA of the same layers",
        "share too few",
        "Spearman",
        "600 tokens",
    ):
        assert words in page
        assert words in text
    row = result["pairs"][0]
    assert row["controls"].keys() == {"token_only", "wrong_document", "tail_only32"}
    assert f"{100 * row['controls']['token_only']:.1f}%" in page
    assert page.count('<tr><th scope="row">') == 11 + 12 + 2 + 1
    assert len(page) < 3_000_000


def test_names_are_escaped_and_tables_rectangular(result: dict[str, Any]) -> None:
    page, text = render_fleet(result), fleet_markdown(result)
    assert "<script" not in page
    assert "<script" not in text
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


@pytest.mark.skipif(
    CHROMIUM is None, reason="Debian's chromium is not installed (apt-get install chromium)"
)
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_the_page_fits_a_phone_and_a_screen(
    result: dict[str, Any], tmp_path: Path, width: int, scheme: str
) -> None:
    write_fleet_report(tmp_path, result, "kvbridge screen b c")
    looks, log = looked_at(tmp_path / "report.html", tmp_path, width, scheme)
    check_looks(looks, log, width, scheme)
