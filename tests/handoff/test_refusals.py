"""A request that cannot be translated is a decision, and its tokens are those of never having
tried."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvbridge import Asset, Bridge, Decision, KVBridgeError, KVSnapshot, RepairPlan, capture
from kvbridge.asset.manifest import Manifest
from kvbridge.errors import UsageError
from kvbridge.handoff.decision import REASONS, discard
from tests.handoff.handoffs import identity, renamed
from tests.models import TEXT, UNICODE_TEXT, tiny, tiny_causal, wrapped

RECEIVER = tiny("llama")
SENDER = renamed(RECEIVER)
TRANSLATOR = identity(SENDER, RECEIVER)
PROMPT = TEXT[:150]


def bridge(**changes) -> Bridge:
    return Bridge(**{"asset": TRANSLATOR, "sender": SENDER, "receiver": RECEIVER, **changes})


def asset() -> Asset:
    manifest = Manifest(
        {"weights_bytes": 1234}, SENDER.geometry, RECEIVER.geometry, TRANSLATOR.maps
    )
    return Asset(Path("nowhere"), "digest-of-asset", manifest, TRANSLATOR)


def poisoned(value: float, layer: int = 2, stream: str = "v") -> KVSnapshot:
    snapshot = capture(SENDER, PROMPT)
    layers = [dict(one) for one in snapshot.layers]
    layers[layer][stream] = layers[layer][stream].clone()
    layers[layer][stream][20, 1, 3] = value
    return replace(snapshot, layers=tuple(layers))


class FixedGate:
    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.seen: list = []

    def decide(self, evidence) -> Decision:
        self.seen.append(evidence)
        return self.decision


class FixedLedger:
    def __init__(self, room: bool) -> None:
        self.room, self.held, self.released = room, 0, 0

    def lease(self, asset):
        return self._held() if self.room else None

    @contextmanager
    def _held(self):
        self.held += 1
        try:
            yield
        finally:
            self.released += 1


def other_tokens():
    """A sender whose tokens almost never end where the receiver's do."""
    return tiny("llama", tokenizer="wordpiece")


def refusals():
    yield "wrong_pair", bridge(), capture(tiny("llama", seed=1), PROMPT), PROMPT
    yield "wrong_pair", bridge(), capture(tiny("qwen3"), PROMPT), PROMPT
    yield "wrong_pair", bridge(), capture(RECEIVER, PROMPT), PROMPT  # the other direction
    swapped = identity(RECEIVER, SENDER)
    yield "contract_mismatch", bridge(asset=swapped), capture(SENDER, PROMPT), PROMPT
    older = replace(RECEIVER.geometry, tokenizer_digest="older")
    stale = replace(TRANSLATOR, maps=replace(TRANSLATOR.maps, receiver=older))
    yield "contract_mismatch", bridge(asset=stale), capture(SENDER, PROMPT), PROMPT
    yield "text_mismatch", bridge(), capture(SENDER, PROMPT), "X" + PROMPT[1:]
    yield "text_mismatch", bridge(), capture(SENDER, PROMPT), PROMPT[:80]
    yield "lineage", bridge(), translated_snapshot(), PROMPT
    yield "too_short", bridge(), capture(SENDER, "The"), "The"
    yield "too_short", bridge(), capture(SENDER, PROMPT[:8]), PROMPT[:8]
    yield "no_asset", bridge(asset=None), capture(SENDER, PROMPT), PROMPT
    for value in (float("nan"), float("inf"), -float("inf")):
        yield "not_finite", bridge(), poisoned(value), PROMPT
    yield "not_finite", bridge(), poisoned(float("nan"), layer=3, stream="k"), PROMPT
    yield (
        "no_room",
        bridge(asset=asset(), ledger=FixedLedger(room=False)),
        capture(SENDER, PROMPT),
        PROMPT,
    )
    yield (
        "gate_refused",
        bridge(gate=FixedGate(discard("gate_refused"))),
        capture(SENDER, PROMPT),
        PROMPT,
    )
    yield (
        "uncalibrated",
        bridge(gate=FixedGate(discard("uncalibrated"))),
        capture(SENDER, PROMPT),
        PROMPT,
    )
    cut = other_tokens()
    across = bridge(asset=identity(cut, RECEIVER), sender=cut, min_exact_share=0.99)
    yield "alignment", across, capture(cut, PROMPT), PROMPT


def translated_snapshot() -> KVSnapshot:
    done = bridge().handoff(capture(SENDER, PROMPT), PROMPT)
    snapshot = done.snapshot()
    assert snapshot.provenance.depth == 1
    return replace(snapshot, geometry=SENDER.geometry)


CASES = [(reason, *rest) for reason, *rest in refusals()]


@pytest.mark.parametrize(("reason", "bridge", "snapshot", "text"), CASES, ids=[c[0] for c in CASES])
def test_refused_request_is_a_plain_prefill(reason, bridge, snapshot, text):
    handoff = bridge.handoff(snapshot, text)
    assert handoff.decision.verdict == "discard"
    assert handoff.decision.reason == reason
    assert not handoff.decision.accepted
    assert str(handoff.decision)
    ids = bridge.receiver.encode(text).ids
    assert torch.equal(handoff.ids, ids)
    assert torch.equal(handoff.remaining_ids, ids[None])
    assert handoff.layers is None
    assert handoff.cached == 0
    assert handoff.provenance.fidelity == "exact"
    assert handoff.cache.get_seq_length() == 0
    plain = bridge.receiver.model.generate(ids[None], max_new_tokens=12, do_sample=False)
    assert torch.equal(handoff.generate(12, do_sample=False), plain)


def test_positions_out_of_range():
    short = wrapped(tiny_causal("llama", max_position_embeddings=40), name="short")
    sender = tiny("llama", seed=3)
    for models in ((sender, short), (short, sender)):
        one = Bridge(identity(*models), sender=models[0], receiver=models[1])
        snapshot = capture(sender, PROMPT)
        if models[0] is short:
            longer = replace(snapshot, geometry=short.geometry)
            snapshot = replace(
                longer, provenance=replace(longer.provenance, producer=short.geometry.digest)
            )
        handoff = one.handoff(snapshot, PROMPT)
        assert handoff.decision.reason == "positions_out_of_range"
        ids = models[1].encode(PROMPT).ids
        plain = models[1].model.generate(ids[None], max_new_tokens=6, do_sample=False)
        assert torch.equal(handoff.generate(6, do_sample=False), plain)
    with pytest.raises(UsageError, match="40 positions"):
        capture(short, PROMPT)


def test_nan_that_nothing_reads_is_harmless():
    snapshot = poisoned(float("nan"), layer=0)
    assert (
        bridge().handoff(snapshot, PROMPT).decision.accepted
    )  # the receiver computes layer 0 itself
    assert (
        bridge().handoff(snapshot, PROMPT, repair=RepairPlan(layers=0)).decision.reason
        == "not_finite"
    )


def test_refused_requests_among_good_ones():
    good, bad = capture(SENDER, PROMPT), capture(RECEIVER, PROMPT)
    handoffs = bridge().handoff_many(
        [(bad, PROMPT), (good, PROMPT), (bad, TEXT), (good, TEXT), (good, "no")]
    )
    assert [h.decision.reason for h in handoffs] == [
        "wrong_pair",
        "ungated",
        "wrong_pair",
        "ungated",
        "text_mismatch",
    ]
    assert [len(h.ids) for h in handoffs] == [
        len(RECEIVER.encode(t)) for t in (PROMPT, PROMPT, TEXT, TEXT, "no")
    ]


def test_no_requests_at_all():
    assert bridge().handoff_many([]) == []


def test_a_ledger_with_room_is_released():
    ledger = FixedLedger(room=True)
    one = bridge(asset=asset(), ledger=ledger)
    handoff = one.handoff(capture(SENDER, PROMPT), PROMPT)
    assert handoff.decision.accepted
    assert handoff.provenance.translator == "digest-of-asset"
    assert (ledger.held, ledger.released) == (1, 1)
    one.handoff(capture(RECEIVER, PROMPT), PROMPT)
    assert ledger.held == 1, "nothing is leased for a refused request"


def test_a_ledger_is_released_when_the_gate_raises():
    ledger = FixedLedger(room=True)

    class Broken:
        def decide(self, evidence):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bridge(asset=asset(), ledger=ledger, gate=Broken()).handoff(capture(SENDER, PROMPT), PROMPT)
    assert (ledger.held, ledger.released) == (1, 1)


@pytest.mark.parametrize("verdict", ["use", "use_approximate"])
def test_a_gate_that_accepts_decides_the_verdict(verdict):
    decision = Decision(
        verdict, "gate_strict" if verdict == "use" else "gate_lenient", score=0.1, threshold=0.2
    )
    gate = FixedGate(decision)
    handoff = bridge(gate=gate).handoff(capture(SENDER, PROMPT), PROMPT, repair=RepairPlan(tail=8))
    flops = handoff.decision.predicted_flops
    assert flops is not None
    assert handoff.decision == replace(decision, predicted_flops=flops)
    assert handoff.provenance.fidelity == "approximate", (
        "whatever the verdict, nothing translated is exact"
    )
    (evidence,) = gate.seen
    own = capture(RECEIVER, PROMPT)
    cached = len(evidence.ids) - 1
    assert evidence.chosen.tolist() == [0, 1, 2, 3, *range(cached - 7, cached)]
    for layer in range(4):
        for name in ("k", "v"):
            assert torch.allclose(
                evidence.translated[layer][name], own.layers[layer][name][:cached], atol=1e-4
            )
            assert torch.allclose(
                evidence.repaired[layer][name], own.layers[layer][name][:cached], atol=1e-4
            )
    assert evidence.predicted_flops > 0


def test_gate_is_not_asked_where_everything_is_exact():
    gate = FixedGate(discard("gate_refused"))
    handoff = Bridge(None, sender=RECEIVER, receiver=RECEIVER, gate=gate).handoff(
        capture(RECEIVER, PROMPT), PROMPT
    )
    assert handoff.decision.verdict == "use"
    assert gate.seen == []


def test_gate_sees_the_translation_before_repair():
    tensors = TRANSLATOR.tensors.items()
    wrong = replace(TRANSLATOR, tensors={n: t + 1 if n.endswith(".b") else t for n, t in tensors})
    gate = FixedGate(Decision("use_approximate", "gate_lenient"))
    bridge(asset=wrong, gate=gate).handoff(capture(SENDER, PROMPT), PROMPT)
    (evidence,) = gate.seen
    assert not torch.allclose(
        evidence.translated[2]["v"][0], evidence.repaired[2]["v"][0], atol=1e-2
    )
    assert torch.equal(evidence.translated[2]["v"][9], evidence.repaired[2]["v"][9])


def test_unicode_text_across_tokenizers_is_accepted():
    cut = tiny("llama", seed=1, tokenizer="bytes_other")
    handoff = Bridge(identity(cut, RECEIVER), sender=cut, receiver=RECEIVER).handoff(
        capture(cut, UNICODE_TEXT), UNICODE_TEXT
    )
    assert handoff.decision.accepted


MISUSE = {
    "no model": lambda: Bridge(TRANSLATOR, sender=SENDER.model, receiver=RECEIVER),
    "no translator": lambda: bridge(asset="a path"),
    "nothing to continue": lambda: bridge().handoff(capture(SENDER, PROMPT)),
    "two things to continue": lambda: bridge().handoff(
        capture(SENDER, PROMPT), PROMPT, input_ids=torch.arange(9)
    ),
    "all layers repaired": lambda: bridge().handoff(
        capture(SENDER, PROMPT), PROMPT, repair=RepairPlan(layers=4)
    ),
    "tail 0": lambda: RepairPlan(tail=0),
    "sinks -1": lambda: RepairPlan(sinks=-1),
    "layers -1": lambda: RepairPlan(layers=-1),
    "token -1": lambda: RepairPlan(tokens=(3, -1)),
    "capture nothing": lambda: capture(SENDER),
    "capture two": lambda: capture(SENDER, PROMPT, input_ids=torch.arange(4)),
    "capture an empty text": lambda: capture(SENDER, ""),
    "capture no ids": lambda: capture(SENDER, input_ids=torch.tensor([], dtype=torch.int64)),
    "unknown reason": lambda: Decision("discard", "because"),
    "unknown verdict": lambda: Decision(*("maybe", "exact")),  # type: ignore[arg-type]
    "cache of a refusal": lambda: bridge().handoff(capture(SENDER, PROMPT), "other").snapshot(),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_raises(name):
    with pytest.raises(UsageError):
        MISUSE[name]()


def test_misuse_is_one_exception_tree():
    assert issubclass(UsageError, KVBridgeError)
    assert issubclass(UsageError, ValueError)


def test_every_reason_has_a_sentence():
    assert all(REASONS.values())
    for reason in REASONS:
        assert REASONS[reason] in str(Decision("discard", reason))


def test_null_ledger_context_is_accepted():
    class Free:
        def lease(self, asset):
            return nullcontext()

    assert (
        bridge(asset=asset(), ledger=Free())
        .handoff(capture(SENDER, PROMPT), PROMPT)
        .decision.accepted
    )


def _scaled(model):
    with torch.no_grad():
        next(iter(model.layers[1].parameters())).mul_(1.01)


def _trained(model):
    model.model.train()
    model.model(torch.arange(8)[None]).logits.sum().backward()
    torch.optim.SGD(model.model.parameters(), lr=1e-3).step()


def _reloaded(model):
    model.model.load_state_dict(model.model.state_dict())


CHANGES = {
    "in_place": (_scaled, "weights"),
    "trained": (_trained, "weights"),
    "state_dict": (_reloaded, "weights"),
    "dtype": (lambda m: m.model.to(torch.bfloat16), "dtype"),
}


@pytest.mark.parametrize("role", ["sender", "receiver"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_since_it_was_loaded(role, change):
    """Its digests are those of other weights: nothing captured before or after may pass under
    them."""
    models = {"sender": wrapped(tiny_causal("llama")), "receiver": wrapped(tiny_causal("llama"))}
    own = Bridge(None, **models)
    snapshot = capture(models["sender"], PROMPT)
    assert own.handoff(snapshot, PROMPT).decision.verdict == "use"
    alter, words = CHANGES[change]
    alter(models[role])
    decision = own.handoff(snapshot, PROMPT).decision
    assert (decision.verdict, decision.reason) == ("discard", "contract_mismatch")
    assert role in decision.detail
    assert words in decision.detail
