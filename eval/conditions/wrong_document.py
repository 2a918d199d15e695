"""Another document's cache through the translator, with the right receiver features, sinks and
tail: a map that ignores its sender scores alike."""

from __future__ import annotations

from kvbridge.eval.conditions.base import TAILS, Condition
from kvbridge.eval.conditions.handed import handed
from kvbridge.eval.conditions.prompt import Prompt
from kvbridge.eval.tasks.start import Start


def _run(prompt: Prompt, tail: int) -> Start:
    return handed(prompt, prompt.setup.bridge, prompt.wrong_snapshot, tail)


WRONG_DOCUMENT = Condition(
    name="wrong_document",
    label="Wrong document",
    phrase="the wrong document",
    role="control",
    run=_run,
    order=5,
    by_tail=True,
    tails=TAILS,
)
