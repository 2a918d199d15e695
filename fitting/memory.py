"""What a fit will take, its models included: printed before it starts, and the refusal that names
what would fit."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvbridge.cache.features import hidden_layer
from kvbridge.errors import OverBudget
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.layout import Layout, make_layout
from kvbridge.geometry import DTYPE_BYTES, KVGeometry

SHARE = 0.7
"""Of what is free on the device: the rest is for the models' own activations and the allocator."""
NARROW = "bfloat16"
"""What half-size models are advised in."""
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Weights:
    """What a model takes: its parameters in the dtype that it is loaded in."""

    parameters: int
    dtype: str

    @classmethod
    def of(cls, geometry: KVGeometry, dtype: str | None = None) -> Weights:
        """A model's, or what they would be in another dtype."""
        return cls(geometry.parameters, dtype or geometry.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return self.parameters * DTYPE_BYTES[self.dtype]

    def line(self) -> str:
        """What to print."""
        return f"{_size(self.nbytes)} ({self.parameters:,} parameters, {self.dtype})"


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a fit on its device, and what is allowed beside the two models.

    `together`: both models are there at once; else one at a time, and the larger one counts.
    """

    sender: Weights
    receiver: Weights
    together: bool
    moments_bytes: int
    rows_bytes: int
    solve_bytes: int
    translator_bytes: int
    budget_bytes: int

    @property
    def models_bytes(self) -> int:
        """What the models hold of the device."""
        both = (self.sender.nbytes, self.receiver.nbytes)
        return sum(both) if self.together else max(both)

    @property
    def peak_bytes(self) -> int:
        """The most beside the models: moments stand throughout; rows and solving do not overlap."""
        return self.moments_bytes + self.translator_bytes + max(self.rows_bytes, self.solve_bytes)

    @property
    def total_bytes(self) -> int:
        """The most in all."""
        return self.models_bytes + self.peak_bytes

    def lines(self) -> list[str]:
        """What to print."""
        at_once = "both at once" if self.together else "one at a time"
        return [
            f"sender {self.sender.line()}",
            f"receiver {self.receiver.line()}",
            f"models, {at_once} {_size(self.models_bytes)}",
            f"moments (train, validation) {_size(self.moments_bytes)}",
            f"rows of a batch {_size(self.rows_bytes)}, solving {_size(self.solve_bytes)}, "
            f"translator {_size(self.translator_bytes)}",
            f"peak beside the models {_size(self.peak_bytes)} of {_size(self.budget_bytes)} allowed",
            f"in all {_size(self.total_bytes)}",
        ]


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"


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
    sender: KVGeometry,
    receiver: KVGeometry,
    config: FitConfig,
    device: torch.device,
    *,
    loaded: bool = True,
) -> MemoryPlan:
    """Bytes a fit takes on `device`; the budget is `memory_bytes` or 70 % of what is free there
    beside the models. `loaded`: they are there already; else what they will take is not free."""
    hidden_layer(config.receiver_features)
    layout = plan_layout(sender, receiver, config)
    stream = max(s.features for s in sender.layers[0].streams)
    inputs = receiver.hidden_size + min(config.layers, len(sender.layers)) * stream
    outputs = max(s.features for layer in receiver.layers for s in layer.streams)
    targets = sum(w for _, w in layout.targets)
    columns = sum(w for _, w in layout.inputs)
    # Rows stand three times: as captured and side by side (4 bytes each), and about their shift;
    # then they are summed in float64, targets also squared in it.
    wide = config.precision == "float64"
    input_bytes = 16 if wide else 20
    target_bytes = 24 if wide else 28
    # Four square matrices at once (the Gram, what is taken off it, the scaled system, its factor);
    # XY with its copies stands beside one map for every λ.
    numbers = 4 * inputs * inputs + (3 + len(config.lambdas)) * inputs * outputs
    plan = MemoryPlan(
        sender=Weights.of(sender),
        receiver=Weights.of(receiver),
        # In host memory both stay, whichever runs.
        together=not config.one_at_a_time or device.type == "cpu",
        moments_bytes=2 * layout.nbytes,
        rows_bytes=config.batch_tokens * (columns * input_bytes + targets * target_bytes),
        solve_bytes=8 * numbers,
        translator_bytes=4 * targets * inputs,
        budget_bytes=config.memory_bytes or 0,
    )
    if config.memory_bytes is not None:
        return plan
    free = free_bytes(device) - (0 if loaded else plan.models_bytes)
    return replace(plan, budget_bytes=max(0, int(SHARE * free)))


def check_memory(
    sender: KVGeometry,
    receiver: KVGeometry,
    config: FitConfig,
    device: torch.device,
    *,
    loaded: bool = True,
) -> MemoryPlan:
    """The plan, or OverBudget naming what would fit: another dtype or one model at a time where the
    models alone are too large for what is free, else the largest `candidates` or a smaller
    batch."""
    plan = plan_memory(sender, receiver, config, device, loaded=loaded)
    if not loaded:
        _check_models(sender, receiver, plan, device)
    if plan.peak_bytes <= plan.budget_bytes:
        return plan

    def peak_bytes(smaller: FitConfig) -> int:
        return plan_memory(sender, receiver, smaller, device, loaded=loaded).peak_bytes

    raise OverBudget(
        f"this fit needs {plan.peak_bytes:,} bytes beside the models, "
        f"{plan.budget_bytes:,} are allowed; "
        f"{_advice(config, len(sender.layers), plan.budget_bytes, peak_bytes)}"
    )


def _check_models(
    sender: KVGeometry, receiver: KVGeometry, plan: MemoryPlan, device: torch.device
) -> None:
    """Raises OverBudget where the models alone take more than is free on `device`."""
    free = free_bytes(device)
    if plan.models_bytes <= free:
        return
    narrow = (Weights.of(sender, NARROW), Weights.of(receiver, NARROW))
    half = replace(plan, sender=narrow[0], receiver=narrow[1])
    alone = device.type != "cpu"
    ways = {
        f"--dtype {NARROW}": half,
        "--one-at-a-time": replace(plan, together=not alone),
        f"--one-at-a-time --dtype {NARROW}": replace(half, together=not alone),
    }
    fitting = [way for way, smaller in ways.items() if smaller.models_bytes <= free]
    least = min(smaller.models_bytes for smaller in ways.values())
    advice = f"nothing fits; the least is {least:,} bytes"
    if fitting:
        advice = f"{fitting[0]} would fit ({ways[fitting[0]].models_bytes:,} bytes)"
    raise OverBudget(
        f"the models take {plan.models_bytes:,} bytes (sender {plan.sender.line()}, receiver "
        f"{plan.receiver.line()}), {free:,} are free on {device}; {advice}"
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
    """Bytes free on a device now. Of the host's, what files are cached in counts as free, where the
    system says how much that is: reading a model's files fills it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if MEMINFO.exists():
        available = re.search(
            r"^MemAvailable: +(\d+) kB$", MEMINFO.read_text("ascii"), re.MULTILINE
        )
        if available is not None:
            return 1024 * int(available[1])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
