"""Tensors out of a safetensors file that was admitted by its header: loaded, and finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvbridge.errors import CorruptFile
from kvbridge.headers import Header, check_safetensors_header


def read_tensors(
    path: Path,
    admit: Callable[[Header], None],
    *,
    max_tensors: int,
    announced_bytes: int | None = None,
) -> dict[str, Tensor]:
    """Every tensor of a file, read only after `admit` (which raises CorruptFile) has seen the
    header.

    Raises CorruptFile: a header out of bounds, another size than announced, NaN or infinity.
    """
    header = check_safetensors_header(path, max_tensors=max_tensors, max_bytes=announced_bytes)
    if announced_bytes is not None and path.stat().st_size != announced_bytes:
        raise CorruptFile(f"{path}: {path.stat().st_size} bytes, {announced_bytes} announced")
    admit(header)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise CorruptFile(f"{path}: {error}") from error
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise CorruptFile(f"{path}: {name} holds NaN or infinity")
    return tensors
