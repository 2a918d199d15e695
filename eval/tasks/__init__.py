"""Evaluation tasks: each turns raw rows into items and scores a start. A new one is one file and one line here."""

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

__all__ = ["TASKS", "Scored", "Task"]
