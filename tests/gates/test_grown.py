"""A cache that `generate` grew token by token, or a server in chunks, is as right as a prefilled
one: limits let it pass."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvbridge import Bridge
from kvbridge.cache.features import early_kv
from kvbridge.cache.prefill import run_decoder
from kvbridge.cache.snapshot import KVSnapshot
from kvbridge.gates.calibrate.items import Attempt, GatedItem, limits_of
from kvbridge.gates.calibrate.job import read_signals
from kvbridge.gates.decide import CalibratedGate
from kvbridge.gates.decide.score import Score
from kvbridge.gates.decide.sealed import Rung
from kvbridge.gates.signals.residuals import ROUNDING, worst
from kvbridge.model.model import Model
from tests.gates.conftest import PLAN, Pair, made_calibration
from tests.models import TEXT, tiny_causal, wrapped

CHECKS = ("sender_first", "sender_early", "sender_tail")


@torch.no_grad()
def grown(model: Model, text: str, chunk: int) -> KVSnapshot:
    """The cache of `text` filled `chunk` tokens at a time."""
    ids, cache = model.encode(text).ids, DynamicCache()
    for positions in torch.arange(len(ids)).split(chunk):
        run_decoder(model, ids[None, positions], cache=cache, position_ids=positions[None])
    return KVSnapshot.from_cache(cache, model, ids, text=text)


@pytest.mark.parametrize("chunk", [1, 7])
def test_limits_of_prefilled_caches_let_grown_ones_pass(pair: Pair, chunk: int) -> None:
    items = []
    for number, text in enumerate(pair.texts[:12]):
        columns, _ = read_signals(pair.evidence(text=text), pair.extras, CHECKS)
        items.append(GatedItem(str(number), str(number), 90, (Attempt(columns, False),)))
    limits = limits_of(items, 0, CHECKS)
    assert set(limits) == set(CHECKS)
    assert max(limits.values()) < -4, "an error of a tenth of a thousandth is still told"
    score = Score(("sender_first",), (0.0,), (1.0,), (0.0,), 0.0)
    gate = CalibratedGate(
        made_calibration(pair, signals=CHECKS, rungs=(Rung(PLAN, score, limits),))
    )
    bridge = Bridge(pair.asset, sender=pair.sender, receiver=pair.receiver, gate=gate)
    for text in pair.texts[12:18]:
        handoff = bridge.handoff(grown(pair.sender, text, chunk), text, repair=PLAN)
        assert handoff.decision.accepted, str(handoff.decision)
    wrong, text = pair.wrong()
    assert bridge.handoff(wrong, text, repair=PLAN).decision.reason == "gate_refused"


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3", "mistral_sliding", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_first_layers_grown_one_by_one_differ_by_less_than_rounding(
    kind: str, dtype: torch.dtype
) -> None:
    model = wrapped(tiny_causal(kind, dtype=dtype))
    snapshot = grown(model, TEXT, 1)
    rows = torch.arange(len(snapshot) - 9, len(snapshot))
    before = [{n: t[: len(snapshot) - 9] for n, t in snapshot.layers[0].items()}]
    again = early_kv(model, snapshot.token_ids[rows], rows, before)
    assert len(again) == 2
    least = torch.tensor(ROUNDING[str(dtype).removeprefix("torch.")]).log10()
    assert worst(snapshot, rows, again) == pytest.approx(float(least))
    again[1]["v"][-1, 0] *= 1 + 8 * ROUNDING[str(dtype).removeprefix("torch.")]
    assert worst(snapshot, rows, again) > float(least) + 0.3
