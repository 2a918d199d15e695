"""What callers hand in, checked at the door: each kind of argument in one place, refused in one line.

What is obviously meant is taken: a list of token ids for a tensor, the name of a dtype.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvbridge.errors import CorruptFile, UsageError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of weights and caches."""
_T = TypeVar("_T")


def expect(value: Any, kind: type[_T] | tuple[type[_T], ...], what: str) -> _T:
    """`value`, which is of `kind`; raises UsageError, saying `what` was expected, where it is not."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UsageError(f"expected {what}, found {found_in(value)}")
    return value


def found_in(value: Any) -> str:
    """A value in a message: what it is, on one line."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    shown = " ".join(repr(value).split())
    short = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f"{type(value).__name__} {short}"


def path_of(value: Any, what: str) -> Path:
    """A path of a text or a path; raises UsageError for anything else, an empty one, and one that no
    file system takes."""
    if not isinstance(value, (str, os.PathLike)) or str(value) == "":
        raise UsageError(f"expected {what}, found {found_in(value)}")
    text = text_of(str(value), what)
    if "\0" in text:
        raise CorruptFile(f"expected {what}, found a path with a zero byte")
    return Path(text)


def dtype_of(value: Any) -> torch.dtype | None:
    """One of DTYPES, by itself or by name; None stays None. Raises UsageError for anything else."""
    named = value
    if isinstance(value, str):
        named = getattr(torch, value.removeprefix("torch."), None)
    if value is None or (isinstance(named, torch.dtype) and named in DTYPES):
        return named
    known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    raise UsageError(f"expected a dtype of {known}, found {found_in(value)}")


def device_of(value: Any) -> torch.device:
    """A device that is there. Raises UsageError, with the reason, for one that is not."""
    expect(value, (str, torch.device), "a device such as cpu or cuda:0")
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        # What torch says of a device depends on its kind and on how it was built.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"expected a device that is there, such as cpu or cuda:0, found {found_in(value)}: "
            f"{reason}"
        ) from error
    if device.type == "meta":
        raise UsageError("expected a device that holds weights, found meta")
    return device


def text_of(value: Any, what: str = "a text") -> str:
    """A text that can be written; raises UsageError for anything else and for half a character."""
    text = expect(value, str, what)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"expected {what}, found a lone surrogate at character {error.start}"
        ) from None
    return text


def messages_of(value: Any) -> list[Any]:
    """A chat of at least one message, each a mapping; raises UsageError for anything else."""
    chat = expect(value, (list, tuple), "a list of messages")
    if not chat:
        raise UsageError("expected at least one message, found none")
    for message in chat:
        expect(message, Mapping, "messages with a role and content")
    return list(chat)


def token_ids(value: Any, vocabulary: int) -> Tensor:
    """Token ids `[tokens]` int64 on the CPU out of an integer tensor `[tokens]` or `[1, tokens]`, or
    of a list of whole numbers. Raises UsageError for anything else, and for ids that are none of
    `vocabulary`."""
    ids = value
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        row = value[0] if len(value) == 1 and isinstance(value[0], Sequence) else value
        if any(isinstance(i, bool) or not isinstance(i, int) for i in row):
            raise UsageError(f"expected token ids [tokens] of one request, found {found_in(value)}")
        if any(not 0 <= i < vocabulary for i in row):
            raise UsageError(
                f"expected token ids from 0 to {vocabulary - 1}, found {min(row)} to {max(row)}"
            )
        ids = torch.tensor(list(row), dtype=torch.int64)
    if (
        not isinstance(ids, Tensor)
        or ids.is_floating_point()
        or ids.is_complex()
        or ids.dtype == torch.bool
    ):
        raise UsageError(f"expected an integer tensor of token ids, found {found_in(value)}")
    if ids.ndim not in (1, 2) or (ids.ndim == 2 and len(ids) != 1):
        raise UsageError(
            f"expected token ids [tokens] or [1, tokens] of one request, found {tuple(ids.shape)}"
        )
    if ids.device.type == "meta":
        raise UsageError("expected token ids with values, found a tensor on the meta device")
    ids = ids.to("cpu", torch.int64).reshape(-1)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise UsageError(
            f"expected token ids from 0 to {vocabulary - 1}, found {int(ids.min())} to "
            f"{int(ids.max())}"
        )
    return ids


def check_vocabulary(ids: Tensor, vocabulary: int, name: str) -> Tensor:
    """`ids` `[tokens]`, which a tokenizer made. Raises UsageError where the model `name` has no such
    tokens: then it is another model's tokenizer."""
    if len(ids) and int(ids.max()) >= vocabulary:
        raise UsageError(
            f"expected token ids from 0 to {vocabulary - 1}, found {int(ids.max())}: this tokenizer "
            f"is not {name}'s"
        )
    return ids


def no_autocast(device: torch.device) -> None:
    """Raises UsageError inside `torch.autocast`: what runs there is cached in another dtype than the
    model's, and is not what the model computes elsewhere."""
    if torch.is_autocast_enabled(device.type):
        raise UsageError(
            f"expected no torch.autocast, found one to {torch.get_autocast_dtype(device.type)}; "
            "leave it for this call, or load the model in that dtype"
        )
