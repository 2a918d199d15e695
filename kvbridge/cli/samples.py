"""The texts of a calibration: prompts that end inside a text, and questions with their answer."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from kvbridge.cli.output import say
from kvbridge.errors import EvalError, UsageError
from kvbridge.eval.tasks.items import RawItem, demo_rows, prompt_and_answers, read_raw
from kvbridge.fitting.skipped import Skipped
from kvbridge.gates.calibrate.passing import Sample
from kvbridge.gates.labels import LABELS

PROMPTS = 3
"""Prompts of one text: its beginnings up to a word near so many characters."""
PROMPT_CHARACTERS = (160, 900)
FOLLOWING_CHARACTERS = 200
"""What is kept of a text behind its longest prompt, for labels that look at what follows."""


def samples_of(
    data: str | None,
    label: str,
    limit: int | None,
    known: Callable[[str], bool] = lambda document: False,
) -> list[Sample]:
    """Texts with several prompts each, or questions with their answer; the demo's held-out texts
    where DATA is None.

    Rows of documents that are `known` (the translator was fitted on them: it errs less there than
    on new text) are left out and counted on stderr. Raises UsageError where no row is left.
    """
    rows = (
        [*demo_rows("test"), *demo_rows("recall")]
        if data is None
        else list(read_raw(data, Skipped(say)))
    )
    raws = [raw for raw in rows if not known(raw.document)]
    if rows and not raws:
        raise UsageError(
            "the translator was fitted on every document of these texts; give others with --data"
        )
    if len(raws) < len(rows):
        say(
            f"{len(rows) - len(raws)} of {len(rows)} rows left out: the translator was fitted on "
            "their documents"
        )
    Random(0).shuffle(raws)
    samples = []
    for raw in raws:
        is_text = isinstance(raw.body.get("text"), str)
        if is_text and LABELS[label].needs_answer:
            continue  # running text has no answer to lose
        sample = _text(raw) if is_text else _question(raw)
        if sample is not None:
            samples.append(sample)
    return samples[:limit]


def _text(raw: RawItem) -> Sample:
    """Prompts of one text that end before a word; where they end follows from the row's id."""
    text = raw.body["text"]
    rng = Random(raw.id)
    lengths = sorted(rng.randint(*PROMPT_CHARACTERS) for _ in range(PROMPTS))
    body = text[: lengths[-1] + FOLLOWING_CHARACTERS]
    ends = {body.rfind(" ", 0, length) for length in lengths}
    inside = sorted(end for end in ends if 0 < end < len(body) - 1)
    return Sample(raw.id, raw.document, body, tuple(inside))


def _question(raw: RawItem) -> Sample | None:
    """One prompt, followed by the right answer; None for a row that asks nothing."""
    try:
        prompt, answers = prompt_and_answers(raw)
    except EvalError:
        return None
    return Sample(raw.id, raw.document, prompt + answers[0], (len(prompt),), answer=True)
