"""What a fit will take, printed before it starts, and the refusal that names what would fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvbridge.cache.features import hidden_layer
from kvbridge.errors import OverBudget
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.layout import Layout, make_layout
from kvbridge.geometry import KVGeometry

SHARE = 0.7
"""Of what is free on the device: the rest is for the models' own activations and the allocator."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a fit beside the models themselves, and what is allowed."""

    moments_bytes: int
    rows_bytes: int
    solve_bytes: int
    translator_bytes: int
    budget_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Moments stand throughout; rows and solving do not overlap."""
        return self.moments_bytes + self.translator_bytes + max(self.rows_bytes, self.solve_bytes)

    def lines(self) -> list[str]:
        """What to print."""
        return [
            f"moments (train, validation) {_gib(self.moments_bytes)}",
            f"rows of a batch {_gib(self.rows_bytes)}, solving {_gib(self.solve_bytes)}, "
            f"translator {_gib(self.translator_bytes)}",
            f"peak beside the models {_gib(self.peak_bytes)} of {_gib(self.budget_bytes)} allowed",
        ]


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def effective_candidates(config: FitConfig) -> int | None:
    """Sender layers considered per target: `nearest` never looks past the layers it takes."""
    return config.layers if config.selection == "nearest" else config.candidates


def control_features(spec: str) -> str:
    """Features of the token-only control: the map's own, or the embeddings where the map has
    none."""
    return "embeddings" if spec == "none" else spec


def plan_layout(sender: KVGeometry, receiver: KVGeometry, config: FitConfig) -> Layout:
    """The layout of a fit; features are always gathered, for the token-only control."""
    return make_layout(sender, receiver, features=True, candidates=effective_candidates(config))


def plan_memory(
    sender: KVGeometry, receiver: KVGeometry, config: FitConfig, device: torch.device
) -> MemoryPlan:
    """Bytes a fit takes on `device`; the budget is `memory_bytes` or 70 % of what is free there."""
    hidden_layer(config.receiver_features)
    layout = plan_layout(sender, receiver, config)
    stream = max(s.features for s in sender.layers[0].streams)
    inputs = receiver.hidden_size + min(config.layers, len(sender.layers)) * stream
    outputs = max(s.features for layer in receiver.layers for s in layer.streams)
    targets = sum(w for _, w in layout.targets)
    columns = sum(w for _, w in layout.inputs) + targets
    # Rows stand three times: as captured and side by side (4 bytes each), and about their shift.
    bytes_per_number = 16 if config.precision == "float64" else 12
    # Four square matrices at once (the Gram, what is taken off it, the scaled system, its factor);
    # XY with its copies stands beside one map for every λ.
    numbers = 4 * inputs * inputs + (3 + len(config.lambdas)) * inputs * outputs
    budget_bytes = config.memory_bytes
    if budget_bytes is None:
        budget_bytes = int(SHARE * free_bytes(device))
    return MemoryPlan(
        moments_bytes=2 * layout.nbytes,
        rows_bytes=config.batch_tokens * columns * bytes_per_number,
        solve_bytes=8 * numbers,
        translator_bytes=4 * targets * inputs,
        budget_bytes=budget_bytes,
    )


def check_memory(
    sender: KVGeometry, receiver: KVGeometry, config: FitConfig, device: torch.device
) -> MemoryPlan:
    """The plan, or OverBudget naming the largest `candidates` (or the smaller batch) that would
    fit."""
    plan = plan_memory(sender, receiver, config, device)
    if plan.peak_bytes <= plan.budget_bytes:
        return plan

    def peak_bytes(smaller: FitConfig) -> int:
        return plan_memory(sender, receiver, smaller, device).peak_bytes

    raise OverBudget(
        f"this fit needs {plan.peak_bytes:,} bytes beside the models, "
        f"{plan.budget_bytes:,} are allowed; "
        f"{_advice(config, len(sender.layers), plan.budget_bytes, peak_bytes)}"
    )


def _advice(
    config: FitConfig,
    sender_layers: int,
    budget_bytes: int,
    peak_bytes: Callable[[FitConfig], int],
) -> str:
    """The settings nearest to `config` that fit: first fewer candidates, then fewer layers, too."""
    for candidates in range(sender_layers - 1, config.layers - 1, -1):
        if peak_bytes(replace(config, candidates=candidates)) <= budget_bytes:
            return f"--candidates {candidates} would fit"
    batch_tokens = min(1024, config.batch_tokens)
    nearest = replace(config, selection="nearest", candidates=None, batch_tokens=batch_tokens)
    for layers in range(config.layers, 0, -1):
        if peak_bytes(replace(nearest, layers=layers)) <= budget_bytes:
            return f"--selection nearest --layers {layers} --batch-tokens {batch_tokens} would fit"
    return f"no setting fits; the least needs {peak_bytes(nearest):,} bytes (--memory-bytes)"


def free_bytes(device: torch.device) -> int:
    """Bytes free on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
