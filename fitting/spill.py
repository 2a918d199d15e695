"""One model at a time: the sender's KV goes to disk within a budget, and comes back beside the
receiver's."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvbridge.cache.prefill import Batch
from kvbridge.errors import OverBudget, UsageError

DISK_SHARE = 0.7
"""Of the free disk: a full one would break whatever else is written there."""


class Spill:
    """Batches of captured KV on disk, in order; `budget_bytes` is never passed. Tensors are kept in
    `dtype` where that loses nothing (values are, as the model cached them), else as they are (keys,
    once RoPE is removed)."""

    def __init__(self, folder: Path, budget_bytes: int, dtype: torch.dtype) -> None:
        self.folder, self.budget_bytes, self.dtype = folder, budget_bytes, dtype
        self.count = 0
        self.nbytes = 0

    def append(self, batch: Batch) -> None:
        """Writes one batch; raises OverBudget, naming the setting, before the budget would be
        passed."""
        tensors = {"mask": batch.mask.cpu()}
        for index, layer in enumerate(batch.layers):
            for name, tensor in layer.items():
                tensors[f"{index}.{name}"] = self._small(tensor).cpu().contiguous()
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if self.nbytes + size > self.budget_bytes:
            raise OverBudget(
                f"the sender's rows need more than the {self.budget_bytes:,} bytes of disk allowed "
                f"(at batch {self.count}); raise --spill-bytes or give fewer texts"
            )
        save_file(tensors, self.folder / f"{self.count:06d}.safetensors")
        self.count, self.nbytes = self.count + 1, self.nbytes + size

    def _small(self, tensor: Tensor) -> Tensor:
        """The tensor in the narrower dtype where every value survives that, else as it is."""
        small = tensor.to(self.dtype)
        return small if torch.equal(small.to(tensor.dtype), tensor) else tensor

    def read(self, number: int) -> Batch:
        """The batch appended as `number`-th (from 0), on the CPU."""
        tensors = load_file(self.folder / f"{number:06d}.safetensors")
        mask = tensors.pop("mask")
        layers = [
            {"k": tensors[f"{i}.k"], "v": tensors[f"{i}.v"]} for i in range(len(tensors) // 2)
        ]
        return Batch(layers, mask, None)


@contextmanager
def spill(folder: str | None, budget_bytes: int | None, dtype: torch.dtype) -> Iterator[Spill]:
    """A Spill in a new temporary folder under `folder`, removed at the end; the default budget is
    70 % of the free disk.

    Raises UsageError where `folder` is not there.
    """
    if folder is not None and not Path(folder).is_dir():
        raise UsageError(f"expected an existing folder to spill rows to, found {folder!r}")
    with tempfile.TemporaryDirectory(prefix="kvbridge-spill-", dir=folder) as path:
        if budget_bytes is None:
            budget_bytes = int(DISK_SHARE * shutil.disk_usage(path).free)
        yield Spill(Path(path), budget_bytes, dtype)
