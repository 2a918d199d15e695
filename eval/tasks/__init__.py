"""Evaluation tasks: each turns raw rows into items and scores a start. A new one is one file and
one line here."""

from typing import Any

from kvbridge.errors import EvalError
from kvbridge.eval.tasks.base import Scored, Task
from kvbridge.eval.tasks.continuation import Continuation
from kvbridge.eval.tasks.multiple_choice import MultipleChoice
from kvbridge.eval.tasks.qa import QuestionAnswering
from kvbridge.eval.tasks.recall import Recall

TASKS: dict[str, Task] = {
    "continuation": Continuation(),
    "recall": Recall(),
    "multiple_choice": MultipleChoice(),
    "qa": QuestionAnswering(),
}
"""By name, in the order in which they are reported."""


def kind_of(body: dict[str, Any]) -> str:
    """Task of a row: the one it names as its `task`, else the first that takes its columns. Raises
    EvalError where none does."""
    if isinstance(body.get("task"), str):
        return str(body["task"])
    for name, task in TASKS.items():
        if task.takes(body):
            return name
    raise EvalError(
        "expected a row with text, or with context, question and answer, found columns "
        f"{', '.join(body)}"
    )


def label_of(task: str) -> str:
    """A task's name in words; of one that is not registered here, its name as it is."""
    return TASKS[task].label if task in TASKS else task


__all__ = ["TASKS", "Scored", "Task", "kind_of", "label_of"]
