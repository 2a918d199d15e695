"""What a run leaves behind once its rows stand: summary, report and Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvbridge.eval.report.page import write_report
from kvbridge.eval.report.summary import summarise, write_summary
from kvbridge.eval.run.rows import read_rows
from kvbridge.format import RUN_META, RUN_ROWS, RUN_SUMMARY


def finish(out: Path, *, texts: dict[str, str] | None = None) -> dict[str, Any]:
    """Writes all three from the rows and the run's description alone; returns the summary.

    `texts` maps item ids to what the report shows of them.
    """
    meta = json.loads((out / RUN_META).read_text("utf-8"))
    rows = read_rows(out / RUN_ROWS).rows
    summary = summarise(rows, meta)
    write_summary(out / RUN_SUMMARY, summary)
    write_report(out, summary, rows, meta, texts=texts)
    return summary
