"""RoPE undone and applied again, against the model's own projection and a plainly written
oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama import modeling_llama

from kvbridge.errors import LoadError, RotationMismatch, UnsupportedModel
from kvbridge.model.probe import cached_layers, recorded_keys
from kvbridge.model.rope import Rotation, measure_rotation
from tests.models import tiny, tiny_causal, wrapped

FAR = [0, 1, 2, 7, 97, 511, 1000, 4095, 8191, 32_767, 65_535, 99_991, 131_071, 131_072]
STYLES = {
    "llama": ("half_split",) * 4,
    "qwen3": ("half_split",) * 4,
    "gemma3": ("half_split",) * 4,
    "phi3": ("half_split",) * 4,
    "cohere": ("interleaved",) * 4,
    "glm": ("interleaved",) * 4,
    "neox": ("half_split",) * 4,
    "gpt2": ("none",) * 4,
    "smollm3": ("half_split", "half_split", "none", "half_split"),
    "llama_yarn": ("half_split",) * 4,
    "llama_llama3": ("half_split",) * 4,
    "llama_linear": ("half_split",) * 4,
}
PARTIAL = {"glm": 8, "neox": 6}


def relative(measured: torch.Tensor, expected: torch.Tensor) -> float:
    return float((measured - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", STYLES)
def test_styles_are_measured(kind):
    model = tiny(kind)
    assert model.rotation.styles == STYLES[kind]
    assert [layer.streams[0].rotated for layer in model.geometry.layers] == [
        s != "none" for s in STYLES[kind]
    ]
    assert not any(layer.streams[1].rotated for layer in model.geometry.layers)


@pytest.mark.parametrize("kind", STYLES)
def test_round_trip_far_out(kind):
    model = tiny(kind)
    positions = torch.tensor(FAR)
    for layer, geometry in enumerate(model.geometry.layers):
        stream = geometry.stream("k")
        keys = torch.randn(
            len(FAR), stream.heads, stream.width, generator=torch.Generator().manual_seed(layer)
        )
        kept = keys.clone()
        there = model.rotation.unrotate(keys, positions, layer)
        assert relative(model.rotation.rotate(there, positions, layer), keys) <= 1e-5
        assert (
            relative(
                model.rotation.unrotate(
                    model.rotation.rotate(keys, positions, layer), positions, layer
                ),
                keys,
            )
            <= 1e-5
        )
        assert torch.equal(keys, kept)
        if STYLES[kind][layer] != "none":
            assert relative(there, keys) > 0.1


@pytest.mark.parametrize("kind", sorted(set(STYLES) - {"gpt2"}))
@torch.no_grad()
def test_unrotated_cache_is_the_projection_far_out(kind):
    """The model itself runs at positions up to 131,072; both directions are compared with what it
    computed."""
    model = tiny(kind)
    positions = torch.tensor(FAR)
    ids = torch.arange(len(FAR)) * 17 % 300 + 4
    cache = DynamicCache()
    with recorded_keys(model.layers, kind) as raw:
        model.decoder(
            input_ids=ids[None], position_ids=positions[None], past_key_values=cache, use_cache=True
        )
    for layer, (keys, _) in enumerate(cached_layers(cache)):
        cached = keys[0].transpose(0, 1)
        content = raw[layer]
        content = (
            content[0].transpose(0, 1)
            if content.ndim == 4 and content.shape[1] == cached.shape[1]
            else content
        )
        content = content.reshape(cached.shape)
        assert relative(model.rotation.unrotate(cached, positions, layer), content) <= 1e-5
        assert relative(model.rotation.rotate(content, positions, layer), cached) <= 1e-5


@pytest.mark.parametrize("kind", sorted(PARTIAL))
def test_partial_rotary_leaves_the_rest_alone(kind):
    model, width = tiny(kind), PARTIAL[kind]
    stream = model.geometry.layers[0].stream("k")
    assert stream.width > width
    keys = torch.randn(3, stream.heads, stream.width)
    turned = model.rotation.rotate(keys, torch.tensor([5, 6, 700]), 0)
    assert torch.equal(turned[..., width:], keys[..., width:])
    assert not torch.isclose(turned[..., :width], keys[..., :width]).all()


def test_against_textbook_rope():
    """Each pair of dimensions as one complex number, times e^{i·position·θ^(−2j/d)}, in float64."""
    model, positions = tiny("llama"), torch.tensor([0, 1, 5, 300])
    keys = torch.randn(4, 2, 16)
    angles = positions[:, None, None].double() * 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)
    turned = torch.complex(keys[..., :8].double(), keys[..., 8:].double()) * torch.exp(1j * angles)
    expected = torch.cat((turned.real, turned.imag), dim=-1).float()
    assert relative(model.rotation.rotate(keys, positions, 0), expected) <= 1e-5


def test_yarn_scale_is_divided_out_twice():
    model = tiny("llama_yarn")
    _, _, scale_squared = model.rotation.phases(torch.arange(9), 0)
    assert float(scale_squared) == pytest.approx((0.1 * math.log(16) + 1) ** 2, rel=1e-5)
    keys = torch.randn(9, 2, 16)
    content = model.rotation.unrotate(keys, torch.arange(9), 0)
    norms = keys.norm(dim=-1) / content.norm(dim=-1)
    assert torch.allclose(norms, torch.full_like(norms, 0.1 * math.log(16) + 1), rtol=1e-4)


def test_layer_types_have_phases_of_their_own():
    rotation = tiny("gemma3").rotation
    assert rotation.layer_types == ("sliding_attention", "full_attention") * 2
    positions = torch.tensor([100])
    assert not torch.allclose(rotation.phases(positions, 0)[0], rotation.phases(positions, 1)[0])
    assert torch.equal(rotation.phases(positions, 0)[0], rotation.phases(positions, 2)[0])


def test_phases_of_a_bfloat16_model_are_computed_in_float32():
    rotation = wrapped(tiny_causal("llama", dtype=torch.bfloat16)).rotation
    cos, sin, _ = rotation.phases(torch.tensor([257, 100_001]), 0)
    assert cos.dtype == torch.float32
    assert float((cos.square() + sin.square() - 1).abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "glm", "llama_yarn"])
def test_other_dtypes_pass_the_self_test(kind, dtype):
    assert wrapped(tiny_causal(kind, dtype=dtype)).rotation.styles == tiny(kind).rotation.styles


def test_digest_tells_ropes_apart():
    digests = [
        tiny(kind).rotation.digest()
        for kind in ("llama", "llama_yarn", "llama_llama3", "llama_linear", "gpt2")
    ]
    assert len(set(digests)) == len(digests)
    rotation = tiny("llama").rotation
    assert replace(rotation, styles=("interleaved",) * 4).digest() != rotation.digest()


def shifted_apply(q, k, cos, sin, *args, **kwargs):
    """Pairs neighbours by halves of a half: no style that exists."""

    def turn(x):
        return torch.cat((-x[..., 4:8], x[..., :4], -x[..., 12:], x[..., 8:12]), dim=-1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


def backwards_apply(q, k, cos, sin, *args, **kwargs):
    return ORIGINAL(q, k, cos, -sin, *args, **kwargs)


ORIGINAL = modeling_llama.apply_rotary_pos_emb


@pytest.mark.parametrize("apply", [shifted_apply, backwards_apply])
def test_a_model_that_rotates_otherwise_is_refused(monkeypatch, apply):
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply)
    with pytest.raises(
        RotationMismatch, match=r"layer 0: .* misses .* by \d\.\d\de[+-]\d\d .*allowed 1e-04"
    ):
        wrapped(tiny_causal("llama"))


@pytest.mark.parametrize("style", ["half_split", "interleaved"])
def test_phases_one_position_off_are_refused(style):
    model = tiny("llama" if style == "half_split" else "cohere")
    positions = torch.arange(13) * 9
    content = [
        torch.randn(13, s.heads, s.width) for s in (g.stream("k") for g in model.geometry.layers)
    ]
    cached = [model.rotation.rotate(c, positions, i) for i, c in enumerate(content)]
    same = measure_rotation(model.decoder, model.model.config, content, cached, positions)
    assert same.styles == (style,) * 4
    with pytest.raises(RotationMismatch, match="layer 0"):
        measure_rotation(model.decoder, model.model.config, content, cached, positions + 1)
    cached[2] = 1.01 * cached[2]
    with pytest.raises(RotationMismatch, match="layer 2"):
        measure_rotation(model.decoder, model.model.config, content, cached, positions)


def test_the_wrong_style_misses_by_far():
    model = tiny("llama")
    keys, positions = torch.randn(13, 2, 16), torch.arange(13) * 9
    wrong = Rotation(model.rotation.module, model.rotation.layer_types, ("interleaved",) * 4)
    assert (
        relative(wrong.unrotate(model.rotation.rotate(keys, positions, 0), positions, 0), keys)
        > 0.5
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 64,
            "factor": 4.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_length_dependent_rope_is_refused(rope):
    model = tiny_causal("llama", rope_parameters=rope)
    with pytest.raises(UnsupportedModel, match=rope["rope_type"]):
        wrapped(model)


def test_mismatch_is_a_load_error():
    assert issubclass(RotationMismatch, LoadError)
