"""The three small models and the held-out texts that ship with kvbridge.

Nothing here imports torch: paths only. The recipe that made them is in
``corpus``, ``tasks``, ``documents``, ``train`` and ``build``; ``measure`` prints their figures.
"""

from pathlib import Path

__all__ = ["MODELS", "TEXTS", "path", "texts"]

MODELS = ("sender", "receiver", "tuned")
TEXTS = ("train", "validation", "test", "recall", "register")

_HERE = Path(__file__).parent


def path(name: str) -> Path:
    """Folder of a demo model, in the layout that transformers loads.

    Raises KeyError for another name.
    """
    if name not in MODELS:
        raise KeyError(f"no demo model {name!r}; there are {', '.join(MODELS)}")
    return _HERE / "models" / name


def texts(split: str) -> Path:
    """The .jsonl file of a split. Raises KeyError for another name."""
    if split not in TEXTS:
        raise KeyError(f"no demo texts {split!r}; there are {', '.join(TEXTS)}")
    return _HERE / "texts" / f"{split}.jsonl"
