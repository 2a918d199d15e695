"""The memory plan: its parts, and a refusal whose advice is then true."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from kvbridge.errors import OverBudget, UsageError
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.memory import check_memory, free_bytes, plan_layout, plan_memory
from kvbridge.fitting.moments import Moments

CPU = torch.device("cpu")


def advised(message: str, config: FitConfig) -> FitConfig:
    """The configuration that a refusal names."""
    changes: dict = {}
    for option, value in re.findall(
        r"--([a-z-]+) (\S+)", message.partition("; ")[2].replace(" would fit", "")
    ):
        changes[option.replace("-", "_")] = int(value) if value.isdecimal() else value
    return (
        replace(config, **changes)
        if "candidates" in changes
        else replace(config, candidates=None, **changes)
    )


@pytest.mark.parametrize("share", [0.95, 0.8, 0.6, 0.4, 0.2, 0.1])
@pytest.mark.parametrize("selection", ["top-k", "greedy", "nearest"])
def test_what_a_refusal_advises_really_passes(share, selection, geometry):
    sender, receiver = geometry("s", 24, 4, 32, 96), geometry("r", 12, 4, 32, 96)
    config = FitConfig(layers=6, selection=selection, batch_tokens=4096)
    plan = plan_memory(sender, receiver, config, CPU)
    tight = replace(config, memory_bytes=int(share * plan.peak_bytes))
    with pytest.raises(OverBudget) as refusal:
        check_memory(sender, receiver, tight, CPU)
    assert f"{plan.peak_bytes:,}" in str(refusal.value)
    if "no setting fits" in str(refusal.value):
        least = int(re.findall(r"needs ([\d,]+) bytes \(", str(refusal.value))[0].replace(",", ""))
        nearest = FitConfig(layers=1, selection="nearest", batch_tokens=1024, memory_bytes=least)
        check_memory(sender, receiver, nearest, CPU)
        assert least > tight.memory_bytes
        return
    better = advised(str(refusal.value), tight)
    assert better != tight
    check_memory(sender, receiver, better, CPU)


def test_candidates_are_advised_first_and_as_many_as_fit(geometry):
    sender, receiver = geometry("s", 24, 4, 32, 96), geometry("r", 4, 4, 32, 96)
    config = FitConfig(layers=2, batch_tokens=256)
    budget = plan_memory(sender, receiver, replace(config, candidates=10), CPU).peak_bytes
    with pytest.raises(OverBudget, match=r"--candidates 10 would fit"):
        check_memory(sender, receiver, replace(config, memory_bytes=budget), CPU)


def test_a_plan_within_its_budget_passes_and_prints(geometry):
    plan = check_memory(geometry("s"), geometry("r"), FitConfig(memory_bytes=1 << 30), CPU)
    assert plan.budget_bytes == 1 << 30
    assert plan.peak_bytes <= plan.budget_bytes
    text = "\n".join(plan.lines())
    assert "1.00 GiB allowed" in text
    assert free_bytes(CPU) > 1 << 20
    assert plan_memory(geometry("s"), geometry("r"), FitConfig(), CPU).budget_bytes <= free_bytes(
        CPU
    )


def test_planned_moments_are_the_bytes_that_moments_hold(geometry):
    sender, receiver = geometry("s", 6, 2, 8, 12), geometry("r", 4)
    for config in (
        FitConfig(),
        FitConfig(layers=2, candidates=3),
        FitConfig(layers=2, selection="nearest"),
    ):
        layout = plan_layout(sender, receiver, config)
        moments = Moments(layout)
        arrays = [moments._yy, moments._x_shift, moments._y_shift, moments._x_sum, moments._y_sum]
        held = sum(t.nbytes for t in (*moments._xx.values(), *moments._xy.values(), *arrays))
        assert plan_memory(sender, receiver, config, CPU).moments_bytes == 2 * held


@pytest.mark.parametrize(
    "wrong",
    [
        {"family": "none"},
        {"selection": "best"},
        {"solver": "lu"},
        {"receiver_features": "hidden:0"},
        {"layers": 0},
        {"receiver_features": "hidden"},
        {"max_tokens": 0},
        {"stride": 0},
        {"batch_tokens": -1},
        {"sinks": -1},
        {"candidates": 2},
        {"lambdas": ()},
        {"lambdas": (0.0,)},
        {"lambdas": (1.0, float("nan"))},
        {"precision": "float16"},
        {"weights_dtype": "int8"},
        {"fractions": (0.9, 0.1, 0.0)},
        {"fractions": (0.5, 0.1, 0.1)},
        {"cosine_documents": -1},
    ],
)
def test_a_configuration_that_means_nothing_is_refused(wrong):
    with pytest.raises(UsageError):
        FitConfig(**wrong)


def test_budgets_and_places_leave_the_configuration_that_an_asset_names():
    plain = FitConfig()
    moved = FitConfig(
        memory_bytes=1, spill_bytes=2, spill_folder="/elsewhere", one_at_a_time=True, force=True
    )
    assert plain.to_json() == moved.to_json()
    assert plain.to_json() != FitConfig(layers=3).to_json()
