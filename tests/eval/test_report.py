from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvbridge.eval.report.markdown import markdown
from kvbridge.eval.report.page import (
    TEXT_CHARACTERS,
    charts,
    display,
    render_html,
    worst_items,
    write_report,
)
from kvbridge.eval.report.summary import dumps, summarise
from kvbridge.eval.report.terminal import Terminal
from kvbridge.eval.run.rows import Row

MakeRows = Callable[..., list[Row]]
HOSTILE = "</pre><script>alert('x')</script><img src=x onerror=alert(1)> & \"quotes\" \u202e"
META = {
    "pair": {
        "sender": "Org/Sender-135M-Instruct",
        "receiver": "org/receiver-270m",
        "digest": "sha256:pair",
    },
    "timings": {"fit_s": 12.5, "note": "two cores"},
    "r2": [
        [(row + column) / 50 - 0.05 if row else None for column in range(30)] for row in range(18)
    ],
    "attention_cosine": [0.99 - 0.02 * layer for layer in range(18)],
    "command": "kvbridge eval run runs/demo/asset --out runs/demo",
    "versions": {"kvbridge": "0.1.0", "torch": "2.13.0"},
}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--allow-file-access-from-files",
    "--enable-logging=stderr",
    "--log-level=0",
    "--virtual-time-budget=4000",
]
PROBE = """<!doctype html><body style="margin:0">
<iframe id="frame" style="border:0;width:{width}px;height:900px"></iframe>
<pre id="found"></pre><script>
const frame = document.getElementById("frame");
frame.onload = () => {{
  const page = frame.contentDocument, view = frame.contentWindow, root = page.documentElement;
  const wide = [];
  for (const node of page.body.querySelectorAll("*")) {{
    if (node.closest(".scroll") && !node.matches(".scroll")) continue;
    const right = node.getBoundingClientRect().right;
    if (right > view.innerWidth + 0.5) wide.push(node.tagName + "." + node.className);
  }}
  const texts = [...page.querySelectorAll("h1,h2,h3,p,dd,pre,.keys div")];
  const cut = texts.filter(n => n.scrollWidth > n.clientWidth + 1);
  document.getElementById("found").textContent = JSON.stringify({{
    inner: view.innerWidth, scroll: root.scrollWidth, wide: wide.slice(0, 5),
    cut: cut.map(n => n.outerHTML.slice(0, 90)),
    dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
    background: view.getComputedStyle(page.body).backgroundColor,
    sections: page.querySelectorAll("section").length,
  }});
}};
frame.src = {page};
</script></body>"""


class Structure(HTMLParser):
    """Open elements must close in order; collects tags and what might be fetched."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.fetched += [
            f"{tag} {name}={value}"
            for name, value in attrs
            if name in ("src", "href", "srcset", "data")
        ]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse(page: str) -> Structure:
    structure = Structure()
    structure.feed(page)
    structure.close()
    assert structure.open == []
    return structure


@pytest.fixture
def full(rows_of: MakeRows) -> tuple[dict, list[Row], dict[str, str]]:
    rows = rows_of(gated=True)
    return summarise(rows, META), rows, {row.item: f"{row.item}: {HOSTILE}" for row in rows}


def test_the_page_is_well_formed_static_and_small(full: tuple) -> None:
    summary, rows, texts = full
    page = render_html(summary, rows, META, texts)
    structure = parse(page)
    assert not structure.tags & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
    }
    assert structure.fetched == []
    assert "url(" not in page
    assert "http://" not in page
    assert "https://" not in page
    assert len(page.encode()) < 3_000_000


def test_the_verdict_comes_first_and_both_denominators_follow(full: tuple) -> None:
    summary, rows, texts = full
    page = render_html(summary, rows, META, texts)
    body = page[page.index("<body>") :]
    places = [
        body.index(text)
        for text in (
            "Translate behind the gate",
            "Against the receiver alone",
            "Against staying with the sender",
            "Recovery,",
        )
    ]
    assert places == sorted(places)
    for bar in charts.recovery_bars(summary).bars:  # type: ignore[union-attr]
        assert html.escape(bar.label, quote=False).replace("'", "&#39;") in body


def test_every_text_is_escaped(full: tuple) -> None:
    _summary, rows, _texts = full
    meta = META | {
        "command": HOSTILE,
        "versions": {HOSTILE: HOSTILE},
        "timings": {HOSTILE: HOSTILE},
    }
    meta["pair"] = {"sender": HOSTILE, "receiver": {"id": HOSTILE}, "digest": "sha256:pair"}
    bad = [
        replace(r, status="failed", reason=HOSTILE) if r.condition == "tail_only" else r
        for r in rows
    ]
    odd = [replace(r, condition=HOSTILE) if r.condition == "no_context" else r for r in bad]
    renamed = [replace(r, item=r.item + HOSTILE, document=HOSTILE) for r in odd]
    page = render_html(summarise(renamed, meta), renamed, meta, {r.item: HOSTILE for r in renamed})
    assert not parse(page).tags & {"script", "img"}


def test_worst_items_are_the_worst_and_their_text_is_cut(rows_of: MakeRows) -> None:
    rows = [
        replace(r, loss=(r.loss or 0) + 500)
        if (r.item, r.condition, r.task) == ("d003i1", "translated", "continuation")
        else r
        for r in rows_of()
    ]
    worst = worst_items(rows, {"d003i1": "x" * 5000})
    assert (worst[0].item, worst[0].document, worst[0].task) == ("d003i1", "doc-3", "continuation")
    assert worst[0].text is not None
    assert len(worst[0].text) <= TEXT_CHARACTERS + 2
    assert worst[1].text is None
    assert len([w for w in worst if w.task == "continuation"]) == 8


def test_a_summary_read_back_from_its_file_gives_the_same_page(full: tuple) -> None:
    summary, rows, texts = full
    assert render_html(json.loads(dumps(summary)), rows, META, texts) == render_html(
        summary, rows, META, texts
    )


@pytest.mark.parametrize(
    "rows",
    [
        lambda make: make(documents=1, per_document=1),
        lambda make: make(tasks=("recall",)),
        lambda make: make(tasks=("continuation",), gated=True),
        lambda make: [r for r in make() if r.condition == "native"],
        lambda make: [
            replace(r, status="failed", reason="x", loss=None, correct=None)
            for r in make(documents=2)
        ],
    ],
)
def test_thin_results_still_make_a_report(
    rows_of: MakeRows, rows: Callable, tmp_path: Path
) -> None:
    all_rows = rows(rows_of)
    summary = summarise(all_rows)
    page, markdown = write_report(tmp_path / "new", summary, all_rows)
    parse(page.read_text())
    assert summary["headline"].split(":")[0] in markdown.read_text()
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "summary.md"]


def test_a_large_heat_map_stays_under_three_megabytes(rows_of: MakeRows) -> None:
    rows = rows_of(documents=2)
    matrix = [[(row * column) % 97 / 97 for column in range(180)] for row in range(180)]
    assert len(render_html(summarise(rows), rows, META | {"r2": matrix}).encode()) < 3_000_000


def test_heat_map_colours_follow_the_values() -> None:
    heat = charts.heat_map([[0.0, 0.5], [1.0, None], [-3.0, float("nan")]])
    assert heat is not None
    colours = {(cell.row, cell.column): cell.fill for cell in heat.cells}
    assert colours[0, 0] == colours[2, 0] == charts.VIRIDIS[0]
    assert colours[1, 0] == charts.VIRIDIS[-1]
    assert colours[0, 1] not in (charts.VIRIDIS[0], charts.VIRIDIS[-1])
    assert (1, 1) not in colours
    assert (2, 1) not in colours
    assert (heat.low, heat.high) == (0.0, 1.0)
    assert charts.heat_map(None) is charts.heat_map([]) is charts.heat_map([[None]]) is None


def test_bars_start_at_zero_and_stay_on_the_axis(rows_of: MakeRows) -> None:
    bars = charts.recovery_bars(
        summarise(rows_of(recovered={"wrong_document": -0.4, "sender": 1.3}))
    )
    assert bars is not None
    for bar in bars.bars:
        assert 0 <= bar.start <= bar.start + bar.width <= 100.01
        assert bar.low is None or bar.high is None or bar.low <= bar.high
    by_name = {bar.name: bar for bar in bars.bars}
    assert by_name["wrong_document"].start + by_name["wrong_document"].width == pytest.approx(
        bars.zero
    )
    assert by_name["wrong_document"].width > 10
    assert by_name["sender"].start + by_name["sender"].width > bars.one + 10
    assert by_name["native"].start == bars.zero
    assert by_name["native"].start + by_name["native"].width == pytest.approx(bars.one)


def test_the_terminal_table_fits_eighty_columns_and_says_what_is_lost(rows_of: MakeRows) -> None:
    rows = rows_of()
    rows[0] = replace(rows[0], status="failed", reason="x", loss=None)
    rows += [
        replace(r, condition="wrong_document_tail17")
        for r in rows
        if r.condition == "wrong_document"
    ]
    summary = summarise(rows, META)
    for width in (80, 120):
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(Terminal(summary))
        text = console.export_text()
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        assert ("Loss" in text) == ("Agreement" in text) == (width >= 100)
        assert "Rows left out (rows are items times conditions): 1 failed" in text
        assert text.lstrip().startswith(summary["verdict"].capitalize())


def test_markdown_tables_are_rectangular_and_texts_are_inert(full: tuple) -> None:
    summary, _, _ = full
    text = markdown(summary | {"pair": {"sender": "a|b<c>`d`", "receiver": "[x](y)"}}, "run `it`")
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    assert "<" not in re.sub("</?sub>", "", text)
    assert "<c>" not in text
    assert "](y)" not in text.replace("\\]", "")
    assert text.startswith("**Translate behind the gate")


@pytest.mark.parametrize(
    ("value", "style", "signed", "text"),
    [
        (None, "percent", False, "–"),
        (0.12345, "percent", False, "12.3%"),
        (0.9999, "percent", False, "100%"),
        (-0.05, "points", True, "−5.0"),
        (0.05, "points", True, "+5.0"),
        (0.32, "small", False, "0.320"),
        (0.0, "small", False, "0"),
        (1234.5, "ms", False, "1234"),
        (0.00001, "p", False, "< 0.001"),
        (20151, "count", False, "20,151"),
    ],
)
def test_numbers_read_well(value: float | None, style: str, signed: bool, text: str) -> None:
    assert display.number(value, style, signed) == text


def looked_at(page: Path, folder: Path, width: int, scheme: str) -> tuple[dict[str, Any], str]:
    """What a page measures in a frame of `width` pixels, and chromium's log."""
    probe = folder / "probe.html"
    probe.write_text(PROBE.format(width=width, page=json.dumps(page.as_uri())))
    preferred = {"dark": "0", "light": "1"}[scheme]
    command = [
        str(CHROMIUM),
        *FLAGS,
        f"--blink-settings=preferredColorScheme={preferred}",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={max(width, 800)},1000",
        "--dump-dom",
        probe.as_uri(),
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    shown = re.search(r'<pre id="found">(.*?)</pre>', run.stdout, re.S)
    assert shown is not None, run.stdout
    return json.loads(html.unescape(shown[1])), run.stderr


def check_looks(looks: dict[str, Any], log: str, width: int, scheme: str) -> None:
    """Nothing overflows, nothing is cut, the scheme is followed, no error is logged."""
    assert looks["inner"] == width
    assert looks["scroll"] <= width
    assert looks["wide"] == []
    assert looks["cut"] == []
    assert looks["dark"] == (scheme == "dark")
    assert ("251, 251, 250" in looks["background"]) == (scheme == "light")
    assert "CONSOLE" not in log


@pytest.mark.skipif(
    CHROMIUM is None, reason="Debian's chromium is not installed (apt-get install chromium)"
)
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_and_no_error_is_logged_in_chromium(
    full: tuple, tmp_path: Path, width: int, scheme: str
) -> None:
    summary, rows, texts = full
    long = {item: text + " " + "w" * 400 for item, text in texts.items()}
    page, _ = write_report(tmp_path, summary, rows, META, long)
    looks, log = looked_at(page, tmp_path, width, scheme)
    check_looks(looks, log, width, scheme)
    assert looks["sections"] == 8


def test_items_left_out_are_not_counted_as_measured_and_no_verdict_is_shown(
    rows_of: MakeRows,
) -> None:
    rows = [r for r in rows_of(tasks=("recall",)) if r.condition in ("native", "sender")]
    lost = [
        replace(r, status="excluded", correct=None, f1=None, reason="too long")
        for r in rows
        if r.document == "doc-0"
    ]
    summary = summarise([*lost, *(r for r in rows if r.document != "doc-0")], META)
    assert (summary["n"], summary["n_left_out"], summary["documents"]) == (116, 4, 29)
    assert summary["tasks"]["recall"]["n"] == 116
    page = render_html(summary, rows, META)
    assert "116 items (4 left out) from 29 documents" in page
    assert "<title>Not judged" in page
    assert "116 items (4 left out)" in markdown(summary)
