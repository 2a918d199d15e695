"""Where a model is loaded from: a demo model, a folder, or a repository at one resolved commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import cached_file, logging

from kvbridge import demo
from kvbridge.errors import LoadError


@dataclass(frozen=True)
class Located:
    """`path` is a folder or a repository; `commit` is empty for a folder, else also the
    revision."""

    path: str
    revision: str | None
    commit: str


def locate(name: str, revision: str | None) -> Located:
    """What `demo:…`, a folder or `org/name[@revision]` stands for now.

    A branch or tag is resolved to its commit, so that all files loaded from it are of that one.
    Raises LoadError for an unknown demo model, OSError where the Hub and its cache have none.
    """
    if name.startswith("demo:"):
        known = name.removeprefix("demo:")
        if known not in demo.MODELS:
            raise LoadError(
                f"expected one of {', '.join('demo:' + m for m in demo.MODELS)}, found {name!r}"
            )
        return Located(str(demo.path(known)), revision, "")
    if Path(name).is_dir():
        return Located(name, revision, "")
    path, separator, named = name.partition("@")
    revision = named if separator else revision
    if Path(path).is_dir():
        return Located(path, revision, "")
    commit = _commit_of(path, revision)
    return Located(path, commit, commit)


def _commit_of(repo: str, revision: str | None) -> str:
    """The commit that a branch or tag stands for now, of the Hub or, offline, of its cache."""
    config = cached_file(repo, "config.json", revision=revision)
    return Path(str(config)).parent.name


@contextmanager
def load_errors(name: str) -> Iterator[None]:
    """What transformers raises on a missing or broken checkpoint becomes a LoadError of one
    line."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LoadError(
            "expected demo:sender, demo:receiver, demo:tuned, a model folder or "
            f"org/name[@revision], found {name!r}: {reason}"
        ) from error


@contextmanager
def no_progress() -> Iterator[None]:
    """Inside the block transformers shows no progress bar; what was set before is put back."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
