"""An accelerator must give what the CPU gives. Skipped without one; KVBRIDGE_TEST_DEVICE names
another device.

pytest tests/device -s      # prints tokens per second of the fit, not compared with anything
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import kvbridge
from benchmarks.gates.attacks import wrong_document
from kvbridge import Bridge, RepairPlan, demo
from kvbridge.fitting.data import read_documents
from kvbridge.gates.calibrate.job import gather, read_signals
from kvbridge.gates.calibrate.passing import Sample, prompts_of, watch, watch_prompts
from kvbridge.gates.signals import SIGNALS

DEVICE = os.environ.get("KVBRIDGE_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(),
    reason="no CUDA device; KVBRIDGE_TEST_DEVICE names another",
)
CONFIG: dict[str, Any] = {
    "layers": 3,
    "max_tokens": 128,
    "lambdas": (1e-2, 1e-1),
    "cosine_documents": 2,
}
GATE_PLAN = RepairPlan(tail=17)
TEXT = (
    "Remember this: Harriet is in the garden. Emma is in the church. "
    "Jane has the letter. Where is Harriet? In the"
)


@cache
def model(name: str, device: str) -> kvbridge.Model:
    return kvbridge.load(f"demo:{name}", device=device)


@cache
def documents() -> tuple[Any, ...]:
    """Some texts of each split."""
    kept = {"train": 60, "validation": 12, "test": 6}
    texts = list(read_documents(str(demo.texts("train").parent)))
    chosen: list[Any] = []
    for split, count in kept.items():
        chosen += [document for document in texts if document.split == split][:count]
    return tuple(chosen)


@cache
def fitted(device: str, **changes: Any) -> Any:
    config = kvbridge.FitConfig(**{**CONFIG, **changes})
    return kvbridge.fit(
        model("sender", device), model("receiver", device), list(documents()), config=config
    )


def bridge(device: str) -> Bridge:
    return Bridge(
        fitted(device).translator,
        sender=model("sender", device),
        receiver=model("receiver", device),
    )


@pytest.mark.parametrize(
    "changes", [{}, {"one_at_a_time": True}, {"precision": "float64"}], ids=["both", "one", "fp64"]
)
def test_a_fit_scores_as_on_the_cpu(changes):
    there, expected = fitted(DEVICE, **changes), fitted("cpu", **changes)
    for key, r2 in expected.scores.r2.items():
        torch.testing.assert_close(
            there.scores.r2[key].cpu(), r2.cpu(), atol=2e-3, rtol=0, equal_nan=True
        )
    print(
        f"{DEVICE}: {there.timings['sender_tokens_per_s']:.0f} sender tokens/s, "
        f"{there.timings['total_s']:.1f} s"
    )


def test_moving_models_for_a_fit_leaves_them_as_they_were():
    fitted(DEVICE, one_at_a_time=True)
    assert model("sender", DEVICE).changed() is None
    assert model("receiver", DEVICE).device.type == torch.device(DEVICE).type


def test_a_handoff_gives_the_cpus_tokens():
    texts = [TEXT, TEXT[:60]]
    for text in texts:
        there, expected = (
            bridge(d).handoff(
                kvbridge.capture(model("sender", d), text), text, repair=RepairPlan(tail=8)
            )
            for d in (DEVICE, "cpu")
        )
        assert there.decision == expected.decision
        assert there.provenance.spans == expected.provenance.spans
        for layer, expected_layer in zip(there.layers, expected.layers, strict=True):
            for name, tensor in expected_layer.items():
                torch.testing.assert_close(layer[name].cpu(), tensor, atol=5e-2, rtol=5e-2)


def test_the_same_model_is_exact_and_a_refusal_is_dense():
    receiver = model("receiver", DEVICE)
    ids = receiver.encode(TEXT).ids[None].to(receiver.device)
    plain = receiver.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    own = Bridge(None, sender=receiver, receiver=receiver).handoff(
        kvbridge.capture(receiver, TEXT), TEXT
    )
    assert own.decision.reason == "exact"
    assert torch.equal(own.generate(12, do_sample=False), plain)
    foreign = Bridge(None, sender=model("sender", DEVICE), receiver=receiver)
    refused = foreign.handoff(kvbridge.capture(model("sender", DEVICE), TEXT), TEXT)
    assert refused.decision.reason == "no_asset"
    assert torch.equal(refused.generate(12, do_sample=False), plain)


def test_an_asset_fitted_there_serves_here(tmp_path: Path):
    kvbridge.save_asset(fitted(DEVICE), tmp_path / "asset")
    asset = kvbridge.load_asset(tmp_path / "asset")
    here = Bridge(asset, sender=model("sender", "cpu"), receiver=model("receiver", "cpu"))
    snapshot = kvbridge.capture(model("sender", DEVICE), TEXT)
    snapshot.save(tmp_path / "one.kv")
    handoff = here.handoff(kvbridge.KVSnapshot.load(tmp_path / "one.kv"), TEXT)
    assert handoff.decision.reason == "ungated"
    assert handoff.generate(4, do_sample=False).shape[1] == len(handoff.ids) + 4


@cache
def judged(device: str, folder: Path) -> Any:
    """A gate's statistics and every signal of a few requests, read on a device; the asset is the
    CPU's."""
    if not folder.exists():
        kvbridge.save_asset(fitted("cpu"), folder)
    asset = kvbridge.load_asset(folder)
    pair = Bridge(asset, sender=model("sender", device), receiver=model("receiver", device))
    texts = [d.text for d in documents() if d.split != "train"]
    samples = [Sample(str(i), str(i), t, (t.rfind(" ", 0, 400),)) for i, t in enumerate(texts)]
    extras = gather(pair, samples[:12], GATE_PLAN)
    seen = list(watch(pair, samples[12:], GATE_PLAN))
    return extras, [
        (read_signals(s.evidence, extras)[0], s.outcome) for s in seen if s.evidence is not None
    ]


def test_a_gate_reads_what_it_reads_on_the_cpu(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "judged"
    extras, there = judged(DEVICE, folder)
    expected_extras, expected = judged("cpu", folder)
    assert len(there) == len(expected) > 3
    for stream, centre in expected_extras.centre.items():
        torch.testing.assert_close(extras.centre[stream], centre, atol=5e-2, rtol=5e-2)
    for half, other in zip(extras.halves, expected_extras.halves, strict=True):
        torch.testing.assert_close(half, other, atol=5e-2, rtol=5e-2)
    checks = {
        c for name in ("sender_first", "sender_early", "sender_tail") for c in SIGNALS[name].columns
    }
    for (row, outcome), (expected_row, known) in zip(there, expected, strict=True):
        for column, value in expected_row.items():
            assert row[column] == pytest.approx(value, abs=0.3 if column in checks else 0.1), column
        assert outcome.kl == pytest.approx(known.kl, abs=5e-2)


def test_a_gate_tells_another_text_there(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "judged"
    extras, right = judged(DEVICE, folder)
    pair = Bridge(
        kvbridge.load_asset(folder),
        sender=model("sender", DEVICE),
        receiver=model("receiver", DEVICE),
    )
    one, other = [d.text[:300] for d in documents() if d.split == "test"][:2]
    (own,) = prompts_of(Sample("a", "a", one, (one.rfind(" "),)), pair.sender, pair.receiver)
    donor = kvbridge.capture(pair.sender, other * 2)
    wrong = wrong_document(own, donor, Random(0), pair.sender)
    (seen,) = watch_prompts(pair, [replace(own, snapshot=wrong)], GATE_PLAN)
    columns, _ = read_signals(seen.evidence, extras)
    for name in ("sender_first", "sender_early", "sender_tail", "first_k", "first_v"):
        assert columns[name] > max(c[name] for c, _ in right), name
