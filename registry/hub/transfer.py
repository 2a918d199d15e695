"""What lies between this machine and a Hub: where downloads wait, and what every failure means."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kvbridge.errors import CorruptFile, TransferFailed
from kvbridge.registry.store.disk import remove_tree

HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]
"""That of the HTTP package in use: its name differs between releases of the Hub's client."""


@contextlib.contextmanager
def downloads(folder: Path, repo: str) -> Iterator[Path]:
    """Where a repository's downloads go; kept after a failure (the next pull goes on), removed
    after success.

    The lock only keeps one pull from removing what another is still reading.
    """
    cache = folder / re.sub(r"[^A-Za-z0-9._-]", "--", repo)[:200]
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / f"{cache.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)
        cache.mkdir(exist_ok=True)
        yield cache
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(cache)
    finally:
        os.close(handle)


@contextlib.contextmanager
def vanished(repo: str) -> Iterator[None]:
    """Where locks do nothing, another pull of the repository may end and remove what this one has
    downloaded."""
    try:
        yield
    except CorruptFile as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise TransferFailed(
                f"pulling {repo}: another pull of it removed the downloads; pull again"
            ) from error
        raise


@contextlib.contextmanager
def hub_errors(action: str) -> Iterator[None]:
    """Turns what the Hub's client raises into TransferFailed with the next step."""
    if constants.HF_HUB_OFFLINE:
        raise TransferFailed(
            f"{action}: offline mode is on; "
            "unset HF_HUB_OFFLINE, or `kvbridge registry add` a folder"
        )
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise TransferFailed(f"{action}: offline mode is on; unset HF_HUB_OFFLINE") from error
    except (RevisionNotFoundError, RepositoryNotFoundError) as error:
        raise TransferFailed(
            f"{action}: no such repository or revision, or not for this token"
        ) from error
    except HTTP_ERROR as error:
        raise TransferFailed(
            f"{action}: {_one_line(error)}; check the address and the token, then try again"
        ) from error
    except (ConnectionError, FileNotFoundError, ValueError) as error:
        raise TransferFailed(f"{action}: {_one_line(error)}; try again") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
