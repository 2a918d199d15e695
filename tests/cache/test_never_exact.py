"""A cache that is not the prompt's whole, contiguous beginning is refused or lowered, never
`exact`; an honest one is taken, however it was filled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvbridge
from kvbridge import Bridge, Handoff, KVSnapshot, capture
from kvbridge.cache.verify import CACHE_ROUNDING, row_errors
from kvbridge.errors import UsageError
from tests.cache.spoilt import HONEST, SPOILT, changed, pairs_of
from tests.models import TEXT, tiny_causal, wrapped

FAMILIES = ("llama", "gpt2", "gemma3", "qwen2", "neox", "smollm3")
KINDS = [
    *((kind, torch.float32) for kind in FAMILIES),
    *((kind, torch.bfloat16) for kind in ("llama", "gemma3", "gpt2")),
    *((kind, torch.float16) for kind in ("llama", "gemma3")),
]
PROMPT = TEXT[:180]
MODELS: dict[tuple[str, torch.dtype], kvbridge.Model] = {}


def model_of(kind: str, dtype: torch.dtype) -> kvbridge.Model:
    if (kind, dtype) not in MODELS:
        MODELS[kind, dtype] = wrapped(tiny_causal(kind, dtype=dtype))
    return MODELS[kind, dtype]


def handed_over(model: kvbridge.Model, way, ids: Tensor) -> Handoff:
    """The prompt and three more tokens, on top of a cache made in that way."""
    cache, given, arguments = way(model, pairs_of(model, ids), ids)
    snapshot = KVSnapshot.from_cache(cache, model, given, **arguments)
    longer = torch.cat((snapshot.token_ids, torch.tensor([40, 41, 42])))
    return Bridge(None, sender=model, receiver=model).handoff(snapshot, input_ids=longer)


def is_the_models_own(model: kvbridge.Model, handoff: Handoff) -> bool:
    """Whether each row is the model's own prefill's, up to rounding."""
    rounding = CACHE_ROUNDING[model.dtype]
    layers = handoff.layers or []
    own = pairs_of(model, handoff.ids.reshape(-1)[: len(layers[0]["k"])])
    for index, (layer, (keys, values)) in enumerate(zip(layers, own, strict=True)):
        for name, tensor in (("k", keys), ("v", values)):
            errors = row_errors(layer[name], tensor[0].transpose(0, 1))
            # Rows behind the snapshot's are computed on top of it: rounding twice.
            if bool((errors > 2 * rounding.worst(index)).any()):
                return False
    return True


@pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("way", HONEST)
def test_an_honest_cache_is_exact(way, kind, dtype):
    model = model_of(kind, dtype)
    handoff = handed_over(model, HONEST[way], model.encode(PROMPT).ids)
    assert str(handoff.decision.verdict) == "use"
    assert handoff.provenance.fidelity == "exact"
    assert is_the_models_own(model, handoff)


@pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("way", SPOILT)
def test_a_spoilt_cache_is_never_exact(way, kind, dtype):
    model = model_of(kind, dtype)
    try:
        handoff = handed_over(model, SPOILT[way], model.encode(PROMPT).ids)
    except UsageError:
        return
    if handoff.decision.verdict == "use" and handoff.provenance.fidelity == "exact":
        assert is_the_models_own(model, handoff)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float16], ids=str)
def test_a_cache_kept_in_less_precision_is_refused(rounded, kind):
    model = model_of(kind, torch.float32)
    way = changed(lambda tensor: tensor.to(rounded).to(tensor.dtype))
    with pytest.raises(UsageError, match="of layer 0 is off by"):
        handed_over(model, way, model.encode(PROMPT).ids)


REFUSALS = {
    "evicted per head": "row 0 .* of layer 0|layer 0 is off by|stands at position",
    "merged, upper": "row 1[01] of layer 1 [kv] is off by",
    "one row zero, last": "row 5 of layer 3 [kv] is off by 100.0%",
    "one row zero, layer 1": "row 5 of layer 1 [kv] is off by 100.0%",
    "other token": r"row 12 \(token",
    "static": "found a static one",
    "batch": "of one request",
    "two prompts": "of one request",
    "packed, told": "go back from 29 to 0 at row 30",
    "packed": "several packed into one row",
}


@pytest.mark.parametrize("way", REFUSALS)
def test_a_refusal_says_which_row_and_why(way):
    model = model_of("llama", torch.float32)
    with pytest.raises(UsageError, match=REFUSALS[way]):
        handed_over(model, SPOILT[way], model.encode(PROMPT).ids)


def test_an_unchecked_cache_is_not_exact():
    model = model_of("llama", torch.float32)
    ids = model.encode(PROMPT).ids
    snapshot = KVSnapshot.from_cache(pairs_of(model, ids), model, ids, check=False)
    assert snapshot.provenance.fidelity == "approximate"
    handoff = Bridge(None, sender=model, receiver=model).handoff(snapshot, PROMPT)
    assert handoff.decision.reason == "lineage"


@pytest.mark.parametrize("given", [None, 3, "cache", [], [1, 2], [(None, None)] * 4, {}])
def test_what_is_no_cache_is_refused(given):
    model = model_of("llama", torch.float32)
    with pytest.raises(UsageError, match="expected"):
        KVSnapshot.from_cache(given, model, model.encode(PROMPT).ids)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_that_drops_out_at_random_is_refused_by_name(kind):
    rates = {"attn_pdrop": 0.1} if kind == "gpt2" else {"attention_dropout": 0.1}
    model = wrapped(tiny_causal(kind, **rates))
    snapshot = capture(model, PROMPT)
    model.model.train()
    with pytest.raises(UsageError, match=r"training, with dropout 0.1 in .*call .eval\(\)"):
        capture(model, PROMPT)
    with pytest.raises(UsageError, match="training"):
        KVSnapshot.from_cache(snapshot.to_cache(model), model, snapshot.token_ids)
    decision = Bridge(None, sender=model, receiver=model).handoff(snapshot, PROMPT).decision
    assert decision.reason == "contract_mismatch"
    assert "training" in decision.detail
    model.model.eval()
    assert model.changed() is None


def test_training_mode_without_dropout_changes_nothing():
    model = wrapped(tiny_causal("llama"))
    model.model.train()
    assert model.training() is None
    assert capture(model, PROMPT).provenance.fidelity == "exact"


class Adapter(torch.nn.Module):
    """As PEFT's layers say what alters them."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling = {"default": 2.0}
        self.disable_adapters = False


@pytest.mark.parametrize("change", ["scaling", "off"])
def test_a_live_adapter_that_was_changed_is_seen(change):
    causal = tiny_causal("llama")
    causal.model.layers[1].adapter = Adapter()
    model = wrapped(causal)
    assert model.changed() is None
    if change == "scaling":
        causal.model.layers[1].adapter.scaling["default"] = 1.0
    else:
        causal.model.layers[1].adapter.disable_adapters = True
    assert model.changed() == "adapter scaling"


def test_the_check_costs_a_forward_of_few_tokens():
    """Of a prompt of any length at most 128 tokens run through all layers."""
    model = model_of("llama", torch.float32)
    ids = model.encode(" ".join([TEXT] * 3)).ids[:600]
    pairs = pairs_of(model, ids)
    ran: list[int] = []
    hook = model.layers[-1].register_forward_pre_hook(
        lambda _module, arguments: ran.append(arguments[0].shape[1])
    )
    KVSnapshot.from_cache(pairs, model, ids)
    hook.remove()
    assert ran == [128]
