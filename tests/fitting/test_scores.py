"""Held-out scores against plain loops, and a probe that leaves the model as it was."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from kvbridge.cache.prefill import capture
from kvbridge.fitting.scores import Residuals, Scores, attention_cosine
from kvbridge.model.attention import PROBE, attention_probe
from kvbridge.model.model import Model
from tests.models import SENTENCES, tiny

KINDS = ("llama", "gemma3", "gpt2", "phi3_sliding", "qwen3")
TEXT = " ".join(SENTENCES[:2])


def perturbed(model: Model, ids: Tensor, noise: float) -> dict[int, dict[str, Tensor]]:
    """The model's own cache with noise, `[tokens, heads, width]` per layer and stream, as
    cached."""
    generator = torch.Generator().manual_seed(0)
    layers = capture(model, input_ids=ids).layers
    draw = lambda t: noise * t.std() * torch.randn(t.shape, generator=generator)  # noqa: E731
    return {i: {n: t + draw(t) for n, t in layer.items()} for i, layer in enumerate(layers)}


def test_residuals_equal_a_plain_calculation_in_any_pieces(geometry):
    generator = torch.Generator().manual_seed(0)
    y = 50 + torch.randn(40, 2, 4, generator=generator)
    y_hat = y + 0.3 * torch.randn(y.shape, generator=generator)
    y_hat[:, 0, 1] = -100.0
    y[:, 1, 2] = 7.25
    residuals = Residuals(geometry("r"))
    for at in (slice(0, 1), slice(1, 17), slice(17, 40)):
        residuals.update({(0, "k"): y[at]}, {0: {"k": y_hat[at]}})
    (r2,) = residuals.r2().values()
    assert residuals.rows == 40
    for head in range(2):
        for column in range(4):
            a, b = y[:, head, column].tolist(), y_hat[:, head, column].tolist()
            mean = sum(a) / 40
            total = sum((v - mean) ** 2 for v in a)
            if (head, column) == (1, 2):
                assert math.isnan(r2[head, column])
            else:
                expected = 1 - sum((v - w) ** 2 for v, w in zip(a, b, strict=True)) / total
                assert float(r2[head, column]) == pytest.approx(expected, rel=1e-5)
    assert float(r2[0, 1]) < -1000, "never clipped"


def test_means_leave_dead_dimensions_out_and_json_says_null():
    r2 = {
        (0, "k"): torch.tensor([[0.5, math.nan], [-3.0, 1.0]]),
        (0, "v"): torch.full((1, 2), math.nan),
    }
    scores = Scores(r2, [0.25], rows=10, documents=2)
    assert scores.mean_r2(0, "k") == pytest.approx(-0.5)
    assert scores.mean_r2(0, "v") is None
    body = scores.to_json()
    assert body["split"] == "test"
    assert body["k_r2"] == [-0.5]
    assert body["v_r2"] == [None]
    assert body["k_r2_heads"] == [[0.5, -1.0]]
    assert body["k_r2_dimensions"] == [[[0.5, None], [-3.0, 1.0]]]
    json.dumps(body, allow_nan=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_own_cache_has_cosine_one(kind):
    model = tiny(kind)
    ids = model.encode(TEXT).ids
    cosine_by_layer = attention_cosine(model, ids, perturbed(model, ids, 0.0), sinks=4)
    assert set(cosine_by_layer) == set(range(4))
    assert all(value == pytest.approx(1.0, abs=1e-5) for value in cosine_by_layer.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sinks", [0, 4])
def test_attention_cosine_equals_a_plain_loop(kind, sinks):
    model = tiny(kind)
    ids = model.encode(TEXT).ids[:24]
    other = perturbed(model, ids, 0.7)
    by_layer = attention_cosine(model, ids, other, sinks)
    seen: dict[int, tuple[Tensor, Tensor, Tensor, float]] = {}

    def keep(layer, query, key, value, mask, scaling):
        seen[layer] = (
            query[0].double(),
            key[0].double(),
            value[0].double(),
            scaling or query.shape[-1] ** -0.5,
        )

    with torch.no_grad(), attention_probe(model.model, keep):
        model.decoder(input_ids=ids[None], use_cache=False)
    for layer, (query, key, value, scaling) in seen.items():
        window = model.geometry.layers[layer].window_tokens
        group = query.shape[0] // key.shape[0]
        cosines = []
        for head in range(query.shape[0]):
            own_k, own_v = key[head // group], value[head // group]
            new_k, new_v = (other[layer][n][:, head // group].double().clone() for n in ("k", "v"))
            new_k[:sinks], new_v[:sinks] = own_k[:sinks], own_v[:sinks]
            for t in range(sinks, len(ids)):
                start = 0 if window is None else max(0, t - window + 1)
                outputs = []
                for k, v in ((own_k, own_v), (new_k, new_v)):
                    weights = torch.softmax(scaling * k[start : t + 1] @ query[head, t], dim=0)
                    outputs.append(weights @ v[start : t + 1])
                cosines.append(float(torch.cosine_similarity(outputs[0], outputs[1], dim=0)))
        assert by_layer[layer] == pytest.approx(sum(cosines) / len(cosines), abs=1e-4)
    assert min(by_layer.values()) < 0.99, "the noise must show"


@pytest.mark.parametrize("kind", KINDS)
def test_the_probe_sees_every_layer_and_alters_nothing(kind):
    model = tiny(kind)
    ids = model.encode(TEXT).ids[None]
    layers: list[int] = []
    with torch.no_grad():
        before = model.model(input_ids=ids).logits
        with attention_probe(model.model, lambda layer, *_: layers.append(layer)):
            inside = model.model(input_ids=ids).logits
        after = model.model(input_ids=ids).logits
    assert layers == list(range(4))
    torch.testing.assert_close(inside, before, rtol=1e-4, atol=1e-4)
    assert torch.equal(after, before)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_the_probe_restores_the_attention_even_on_an_error(kind):
    model = tiny(kind)
    before = model.model.config._attn_implementation
    modules = [m.config._attn_implementation for m in model.model.modules() if hasattr(m, "config")]

    def fail(*_: object) -> None:
        assert model.model.config._attn_implementation == PROBE
        raise RuntimeError("observed")

    with pytest.raises(RuntimeError, match="observed"), attention_probe(model.model, fail):
        model.decoder(input_ids=model.encode(TEXT).ids[None])
    assert model.model.config._attn_implementation == before != PROBE
    assert [
        m.config._attn_implementation for m in model.model.modules() if hasattr(m, "config")
    ] == modules
