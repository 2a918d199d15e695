"""A receiver that is the sender written in another basis: a linear map between their caches exists,
and a fit finds it."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import kvbridge
from kvbridge import Bridge, FitConfig, Model, RepairPlan, capture
from tests.handoff.handoffs import TOLERANCE, assert_exact, continued
from tests.models import TEXT, random_texts, tiny_causal, wrapped

KINDS = ("llama", "llama_yarn", "llama_llama3")
LAYERS, HEAD_DIM, HEADS, KV_HEADS = 3, 16, 4, 2


def small(kind: str):
    return tiny_causal(kind, num_hidden_layers=LAYERS)


def orthogonal(size: int, draw: torch.Generator) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64))[0]


def pair_rotation(draw: torch.Generator) -> torch.Tensor:
    """`[head_dim, head_dim]`: turns every RoPE pair (j, j + d/2) by an angle of its own, so it
    commutes with RoPE."""
    half = HEAD_DIM // 2
    angle = torch.rand(half, generator=draw, dtype=torch.float64) * 6.28
    cos, sin = angle.cos().diag(), angle.sin().diag()
    return torch.cat((torch.cat((cos, -sin), 1), torch.cat((sin, cos), 1)))


@torch.no_grad()
def fold(norm, *projections) -> None:
    """Moves a norm's weight into the projections that read it (all modified)."""
    for linear in projections:
        linear.weight.mul_(norm.weight)
    norm.weight.fill_(1.0)


def left(linear, matrix: torch.Tensor) -> None:
    """Makes `linear` return `matrix` times its output."""
    linear.weight.copy_(matrix @ linear.weight)
    if linear.bias is not None:
        linear.bias.copy_(matrix @ linear.bias)


def right(linear, matrix: torch.Tensor) -> None:
    """Makes `linear` read an input that was multiplied by `matrix`, orthogonal."""
    linear.weight.copy_(linear.weight @ matrix.T)


@torch.no_grad()
def rebase(model, seed: int = 0):
    """Rewrites a Llama in float64 (modified, returned) so that its logits stay and its cache is in
    another basis.

    Residual stream: rotated (norm weights folded first, RMSNorm commutes with rotations). KV heads:
    permuted, with their query heads. Values: rotated per head. Keys and queries: rotated within
    RoPE pairs per KV head.
    """
    draw = torch.Generator().manual_seed(seed)
    base, group = model.model, HEADS // KV_HEADS
    stream = orthogonal(model.config.hidden_size, draw)
    base.embed_tokens.weight.copy_(base.embed_tokens.weight @ stream.T)
    fold(base.norm, model.lm_head)
    right(model.lm_head, stream)
    for layer in base.layers:
        attention, mlp = layer.self_attn, layer.mlp
        fold(layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj)
        fold(layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
        order = torch.randperm(KV_HEADS, generator=draw).tolist()
        if order == sorted(order):
            order.reverse()
        keys, values = torch.zeros(32, 32).double(), torch.zeros(32, 32).double()
        queries, mixed = torch.zeros(64, 64).double(), torch.zeros(64, 64).double()
        for new, old in enumerate(order):
            turn, spin = pair_rotation(draw), orthogonal(HEAD_DIM, draw)
            keys[block(new), block(old)], values[block(new), block(old)] = turn, spin
            for i in range(group):
                here, there = block(new * group + i), block(old * group + i)
                queries[here, there], mixed[here, there] = turn, spin
        left(attention.q_proj, queries)
        left(attention.k_proj, keys)
        left(attention.v_proj, values)
        right(attention.o_proj, mixed)
        for linear in (
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            mlp.gate_proj,
            mlp.up_proj,
        ):
            right(linear, stream)
        for linear in (attention.o_proj, mlp.down_proj):
            left(linear, stream)
    return model


def block(head: int) -> slice:
    return slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)


@cache
def pair(kind: str) -> tuple[Model, Model, kvbridge.Fit]:
    sender = wrapped(small(kind), name="sender")
    receiver = wrapped(rebase(small(kind).double()).float(), name="receiver")
    config = FitConfig(
        layers=1,
        selection="nearest",
        receiver_features="none",
        lambdas=(1e-12,),
        precision="float64",
        stride=1,
        cosine_documents=4,
    )
    texts = [
        {"text": t, "id": str(i), "split": split_of(i)} for i, t in enumerate(random_texts(12, 300))
    ]
    return sender, receiver, kvbridge.fit(sender, receiver, texts, config=config)


def split_of(number: int) -> str:
    return {0: "validation", 1: "test"}.get(number, "train")


@pytest.mark.parametrize("kind", KINDS)
def test_the_rewritten_model_is_the_same_function(kind):
    sender, receiver, _ = pair(kind)
    ids = sender.encode(TEXT).ids[None]
    exact, rewritten = small(kind).double(), rebase(small(kind).double())
    with torch.no_grad():
        assert float((exact(ids).logits - rewritten(ids).logits).abs().max()) < TOLERANCE
        assert (
            float((sender.model(ids).logits - receiver.model(ids).logits).abs().max())
            < 5 * TOLERANCE
        )
    sent, received = capture(sender, TEXT), capture(receiver, TEXT)
    for layer in range(LAYERS):
        for name in ("k", "v"):
            off = (sent.layers[layer][name] - received.layers[layer][name]).abs().max()
            assert float(off) > 0.5, "the caches are in different bases"


@pytest.mark.parametrize("kind", KINDS)
def test_the_fit_finds_the_map(kind):
    """Every layer reads its own layer of the sender; what is left on held-out text is rounding."""
    _, _, fit = pair(kind)
    assert fit.marks == ()
    assert fit.translator.layers == fit.translator.sender_layers == (0, 1, 2)
    for r2 in fit.scores.r2.values():
        assert float(r2[~r2.isnan()].min()) > 0.99999


@pytest.mark.parametrize(
    "plan", [RepairPlan(), RepairPlan(sinks=4, layers=0), RepairPlan(tail=20, layers=2)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_handoff_is_exact(kind, plan):
    sender, receiver, fit = pair(kind)
    bridge = Bridge(fit.translator, sender=sender, receiver=receiver)
    for text in (TEXT, *random_texts(3, 120, seed=9)):
        handoff = bridge.handoff(capture(sender, text), text, repair=plan)
        assert handoff.decision.verdict == "use_approximate"
        assert_exact(handoff, continued(receiver, handoff.ids))
        plain = receiver.model.generate(handoff.ids[None], max_new_tokens=16, do_sample=False)
        assert torch.equal(handoff.generate(16, do_sample=False), plain)


def test_the_other_direction_is_refused():
    sender, receiver, fit = pair("llama")
    swapped = Bridge(fit.translator, sender=receiver, receiver=sender)
    assert swapped.handoff(capture(receiver, TEXT), TEXT).decision.reason == "contract_mismatch"
