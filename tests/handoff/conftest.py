"""Near-ties are counted where exact continuations were compared, and shown at the end of the
run."""

from __future__ import annotations

from tests.handoff.handoffs import COMPARED, NEAR_TIE, TOLERANCE


def pytest_terminal_summary(terminalreporter):
    exact = [(off, margin) for off, margin in COMPARED if off <= TOLERANCE]
    if exact:
        ties = sum(margin < NEAR_TIE for _, margin in exact)
        most, least = max(off for off, _ in exact), min(margin for _, margin in exact)
        terminalreporter.write_line(
            f"exact continuations compared: {len(exact)}, logits off by at most {most:.1e}, "
            f"near-ties (margin < {NEAR_TIE:.0e}): {ties}, least margin {least:.1e}"
        )
