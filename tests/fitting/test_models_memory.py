"""The memory plan counts the models: before any weight is read, as much as a real fit then takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvbridge
from kvbridge.errors import OverBudget
from kvbridge.fitting import memory
from kvbridge.fitting.config import FitConfig
from kvbridge.fitting.memory import check_memory, plan_memory
from kvbridge.model.load import AutoModelForCausalLM
from kvbridge.model.outline import outline, stored_dtype
from tests.models import CONFIGS, tiny, tiny_causal, tiny_tokenizer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MEASURED = """
import json, re, sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
import torch, kvbridge
from kvbridge import demo
from kvbridge.fitting.data import read_documents
from kvbridge.fitting.job import fit
from kvbridge.fitting.memory import plan_memory
from kvbridge.model.outline import outline

def held(what):
    return 1024 * int(re.search(rf"^{what}:\\s+(\\d+)", Path("/proc/self/status").read_text(), re.M)[1])

names = ("demo:sender", "demo:receiver")
config = kvbridge.FitConfig(layers=2, max_tokens=128, batch_tokens=int(sys.argv[1]))
documents = []
for split, count in (("train", 60), ("validation", 12), ("test", 4)):
    read = read_documents(str(demo.texts(split)))
    documents += [replace(document, split=split) for document in islice(read, count)]
planned = plan_memory(*[outline(n, None, torch.device("cpu")) for n in names], config, torch.device("cpu"))
before = held("VmRSS")
fit(*map(kvbridge.load, names), documents, config=config)
print(json.dumps({"planned": planned.total_bytes, "measured": held("VmHWM") - before}))
"""


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_outline_has_the_shapes_of_the_loaded_model(kind, dtype, tmp_path):
    model = tiny(kind)
    model.model.config.save_pretrained(tmp_path)
    outlined = outline(str(tmp_path), dtype, CPU)
    assert outlined is not None
    geometry = model.geometry
    for name in ("hidden_size", "attention_heads", "vocabulary", "parameters", "architecture"):
        assert getattr(outlined, name) == getattr(geometry, name), name
    assert [layer.window_tokens for layer in outlined.layers] == [
        layer.window_tokens for layer in geometry.layers
    ]
    for planned, loaded in zip(outlined.layers, geometry.layers, strict=True):
        assert [s.features for s in planned.streams] == [s.features for s in loaded.streams]
    sizes = plan_memory(outlined, geometry, FitConfig(layers=2), CPU).sender
    assert sizes.nbytes == sum(p.numel() for p in model.model.parameters()) * dtype.itemsize


def test_nothing_of_the_model_is_allocated_or_read(tmp_path, monkeypatch):
    """A configuration of 100 million parameters, without any weights beside it."""
    config = tiny("llama").model.config.to_dict() | {"hidden_size": 4096, "intermediate_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    outlined = outline(str(tmp_path), None, CPU)
    assert outlined is not None
    assert outlined.parameters > 100_000_000


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("declared", [True, False])
def test_the_stored_dtype_is_the_configuration_s_or_the_header_s(stored, declared, tmp_path):
    tiny_causal("llama", dtype=stored).save_pretrained(tmp_path)
    if not declared:
        path = tmp_path / "config.json"
        body = json.loads(path.read_text())
        body.pop("dtype", None)
        body.pop("torch_dtype", None)
        path.write_text(json.dumps(body))
    assert stored_dtype(str(tmp_path)) == stored


def test_models_too_large_are_refused_with_what_fits(monkeypatch, geometry):
    sender, receiver = geometry("s", 8, 4, 32, 96), geometry("r", 8, 4, 32, 96)
    sender, receiver = replace(sender, parameters=10**9), replace(receiver, parameters=2 * 10**9)
    for free, device, advice in (
        (7 * 10**9, CPU, "--dtype bfloat16 would fit (6,000,000,000 bytes)"),
        (7 * 10**9, CUDA, "--dtype bfloat16 would fit (6,000,000,000 bytes)"),
        (5 * 10**9, CPU, "nothing fits; the least is 6,000,000,000 bytes"),
        (5 * 10**9, CUDA, "--one-at-a-time --dtype bfloat16 would fit (4,000,000,000 bytes)"),
        (3 * 10**9, CUDA, "nothing fits; the least is 4,000,000,000 bytes"),
    ):
        monkeypatch.setattr(memory, "free_bytes", lambda _, free=free: free)
        with pytest.raises(OverBudget) as refusal:
            check_memory(sender, receiver, FitConfig(), device, loaded=False)
        assert advice in str(refusal.value)
        assert "receiver 7.45 GiB (2,000,000,000 parameters, float32)" in str(refusal.value)
        # Where they are loaded already, what they hold is no part of what is free.
        if free > 4 * 10**9:
            check_memory(sender, receiver, FitConfig(), device)
    monkeypatch.setattr(memory, "free_bytes", lambda _: 20 * 10**9)
    before = check_memory(sender, receiver, FitConfig(), CPU, loaded=False)
    assert before.budget_bytes == int(0.7 * 8 * 10**9)


def test_one_at_a_time_counts_the_larger_one_but_in_host_memory(geometry):
    pair = (replace(geometry("s"), parameters=100), replace(geometry("r"), parameters=300))
    alone = FitConfig(one_at_a_time=True, memory_bytes=1 << 40)
    assert plan_memory(*pair, alone, CUDA).models_bytes == 1200
    assert plan_memory(*pair, alone, CPU).models_bytes == 1600
    assert plan_memory(*pair, replace(alone, one_at_a_time=False), CUDA).models_bytes == 1600


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("batch_tokens", [2048, 8192])
def test_the_plan_of_a_real_fit_is_near_what_it_takes(batch_tokens):
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(batch_tokens)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    body = json.loads(done.stdout.splitlines()[-1])
    # Beside it the models' own activations, and what the allocator keeps.
    assert 0.5 < body["measured"] / body["planned"] < 2, body


def test_a_loaded_pair_is_planned_like_its_outline(tmp_path):
    """What `fit` says of models that are there is what the dry run said of them."""
    folders = []
    for kind in ("llama", "qwen3"):
        folder = tmp_path / kind
        tiny_causal(kind, dtype=torch.bfloat16).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        folders.append(str(folder))
    for dtype in (None, torch.bfloat16):
        config = FitConfig(layers=2, memory_bytes=1 << 30)
        outlined = [outline(folder, dtype, CPU) for folder in folders]
        loaded = [kvbridge.load(folder, dtype=dtype).geometry for folder in folders]
        assert None not in outlined
        assert plan_memory(*outlined, config, CPU) == plan_memory(*loaded, config, CPU)
