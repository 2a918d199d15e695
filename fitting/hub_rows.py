"""Rows of a dataset on the Hub, streamed; whatever goes wrong is one line."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvbridge.errors import DataError
from kvbridge.fitting.readers import plain

LOGGERS = tuple(
    f"datasets.packaged_modules.{kind}.{kind}" for kind in ("json", "parquet", "text", "csv")
)
"""Loggers of the readers of `datasets`."""
NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
FULL = (errno.ENOSPC, errno.EDQUOT)


def hub_rows(name: str) -> Iterator[tuple[str, Any]]:
    """(split, row) of a dataset; raises DataError."""
    try:
        with _without_logs():
            # Slow to import, and it looks for its cache folder while it is imported.
            from datasets import load_dataset
            from datasets.exceptions import DatasetsError
    except OSError as error:
        raise DataError(_trouble(name, error)) from error
    try:
        with _without_logs():
            splits = load_dataset(name, streaming=True).items()
        for split, streamed in splits:
            rows, end = iter(streamed), object()
            while True:
                with _without_logs():
                    row = next(rows, end)
                if row is end:
                    break
                yield split, plain(row)
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(_trouble(name, error)) from error


def _trouble(name: str, error: Exception) -> str:
    """What went wrong, and what to do where it is the cache folder's fault."""
    code = error.errno if isinstance(error, OSError) else None
    if code in NOT_WRITABLE:
        return (
            f"{name}: the Hub's cache folder cannot be written to ({error}); set HF_HOME to a "
            "folder that can"
        )
    if code in FULL:
        return f"{name}: the disk is full ({error}); free some, or set HF_HOME to another disk"
    said = " ".join(str(error).split())
    return f"{name}: not a file here, and the Hub did not give it: {said}"


@contextmanager
def _without_logs() -> Iterator[None]:
    """Keeps the readers of `datasets` from logging what they raise anyway; whatever else logs is
    left alone."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
