"""Near-ties are counted where exact continuations were compared, and shown at the end of the run."""

from __future__ import annotations

from tests.core.handoffs import COMPARED, NEAR_TIE


def pytest_terminal_summary(terminalreporter):
    if COMPARED:
        ties = sum(margin < NEAR_TIE for margin in COMPARED)
        terminalreporter.write_line(
            f"exact continuations compared: {len(COMPARED)}, near-ties (margin < {NEAR_TIE:.0e}): {ties}, "
            f"least margin {min(COMPARED):.1e}"
        )
