"""A decoder layer's attention: the one place that knows under which names it and its parts stand.

Loading reads from here where keys before RoPE come from, recorded queries where queries do, and
held-out scores what an attention is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask

from kvbridge.errors import UnsupportedModel

PROBE = "kvbridge_probe"
"""Name under which transformers knows the attention of `attention_probe`."""
LAYER_LISTS = ("layers", "h", "blocks")
ATTENTIONS = ("self_attn", "attn", "attention")


@dataclass(frozen=True, eq=False)
class Projection:
    """Where queries or keys are computed: `take` gets them out of what `module` returns.

    `module` is a part of the live model. `take` maps the module's output `[batch, tokens, ·]` to
    `[batch, tokens, heads · width]` and copies nothing.
    """

    module: nn.Module
    take: Callable[[Tensor], Tensor]


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """The decoder's list of layers, under whichever of the usual names it stands.

    Raises UnsupportedModel where it stands under none.
    """
    for name in LAYER_LISTS:
        layers = getattr(decoder, name, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise UnsupportedModel(
        f"{type(decoder).__name__}: expected a list of layers named layers, h or blocks, found none"
    )


def attention_of(layer: nn.Module) -> Any:
    """A layer's attention module, under whichever of the usual names; None where it has none."""
    names = [name for name in ATTENTIONS if hasattr(layer, name)]
    return getattr(layer, names[0]) if names else None


def projection(attention: Any, part: Literal["q", "k"]) -> Projection | None:
    """Where an attention projects its queries or keys, alone or fused with the others.

    None where it stands under none of the known names. Norms that follow are not included.
    """
    index = ("q", "k").index(part)
    alone = getattr(attention, f"{part}_proj", None)
    if isinstance(alone, nn.Module) and not isinstance(alone, nn.Identity):
        return Projection(alone, _whole)
    if hasattr(attention, "multi_query"):
        return _bigcode(attention, index)
    if hasattr(attention, "c_attn"):
        # GPT-2: queries, keys and values side by side, equally wide.
        return Projection(attention.c_attn, lambda output: output.chunk(3, dim=-1)[index])
    if hasattr(attention, "qkv_proj"):
        # Phi-3: side by side, but keys and values may have fewer heads than queries.
        config, width = getattr(attention, "config", None), getattr(attention, "head_dim", None)
        if config is None or not hasattr(config, "num_key_value_heads") or width is None:
            # CodeGen: another order, by the cores that it was trained on.
            return None
        sizes = (config.num_attention_heads * width, config.num_key_value_heads * width)
        start = sum(sizes[:index])
        return Projection(
            attention.qkv_proj, lambda output: output[..., start : start + sizes[index]]
        )
    if hasattr(attention, "query_key_value"):
        # GPT-NeoX: query, key and value of one head stand together, then the next head's.
        holder = getattr(attention, "config", attention)
        heads = getattr(holder, "num_attention_heads", None)
        if heads is None or attention.query_key_value.out_features % (3 * heads):
            return None
        return Projection(
            attention.query_key_value,
            lambda output: output.unflatten(-1, (heads, 3, -1))[..., index, :].flatten(-2),
        )
    return None


def _bigcode(attention: Any, index: int) -> Projection:
    """Of GPT-BigCode: all queries, then one head's keys and values; or, without multi-query, query,
    key and value of each head together."""
    if not attention.multi_query:
        heads = attention.num_heads
        return Projection(
            attention.c_attn,
            lambda output: output.unflatten(-1, (heads, 3, -1))[..., index, :].flatten(-2),
        )
    sizes = (attention.embed_dim, attention.kv_dim)
    start = sum(sizes[:index])
    return Projection(attention.c_attn, lambda output: output[..., start : start + sizes[index]])


def normed_keys(attention: Any) -> Projection | None:
    """Where an attention has its keys as RoPE gets them: after its key norm, if there is one."""
    norm = getattr(attention, "k_norm", None)
    if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity):
        return Projection(norm, _whole)
    return projection(attention, "k")


def normed_queries(attention: Any, flat: Tensor, width: int) -> Tensor:
    """Projected queries `[n, heads · width]` as `[n, heads, width]` fp32, through the query norm.

    Some models normalise each head, some all heads together: then the norm's weight is as long as
    all of them.
    """
    norm = getattr(attention, "q_norm", None)
    if not isinstance(norm, nn.Module):
        return flat.unflatten(-1, (-1, width)).float()
    weight = getattr(norm, "weight", None)
    shape = weight.shape if isinstance(weight, Tensor) else None
    if flat.shape[-1] != width and shape == flat.shape[-1:]:
        normed: Tensor = norm(flat).unflatten(-1, (-1, width))
    else:
        normed = norm(flat.unflatten(-1, (-1, width)))
    return normed.float()


def plain_softmax(attention: Any) -> bool:
    """Whether attention weights are the softmax of scaled dot products and of nothing else.

    Soft-capped logits and learned attention sinks are not: there, queries and keys alone do not
    give the weights.
    """
    return not getattr(attention, "attn_logit_softcapping", None) and not hasattr(
        attention, "sinks"
    )


def scaling_of(attention: Any, width: int) -> float:
    """The factor on dot products of queries and keys of `width`: the module's own, else
    1/√width."""
    return float(getattr(attention, "scaling", width**-0.5))


def mask_refusal(model: Any) -> str | None:
    """Why a transformers model's attention implementation cannot be given a dense mask; None where
    it can.

    Tokens recomputed in the middle of a cache see rows that no causal mask describes. Flash
    attention takes none, flex attention takes blocks, and torch ends the process over a dense one.
    """
    name = model.config.get_text_config(decoder=True)._attn_implementation
    registered = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    if registered in (sdpa_mask, eager_mask):
        return None
    return (
        f"expected an attention implementation that takes a dense mask, found {name}; "
        "load the model with attn_implementation='sdpa' or 'eager'"
    )


@contextmanager
def recorded(
    projections: Mapping[int, Projection], keep: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """Inside the block, `keep(layer, output)` gets what each projection gives in every forward.

    `output` `[batch, tokens, heads · width]`, detached. The hooks are removed at the end.
    """
    handles = []
    try:
        for layer, source in projections.items():

            def hook(
                _module: nn.Module,
                _arguments: Any,
                output: Tensor,
                layer: int = layer,
                take: Callable[[Tensor], Tensor] = source.take,
            ) -> None:
                keep(layer, take(output.detach()))

            handles.append(source.module.register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def attention_probe(model: Any, observe: Callable[..., None]) -> Iterator[None]:
    """Inside the block, `observe(layer, query, key, value, mask, scaling)` sees every attention.

    `model` is a transformers model; what is seen is exactly as computed, after RoPE and norms:
    query, key and value `[batch, heads, tokens, width]`. Outputs are unchanged, and the model's own
    attention is restored at the end.
    """

    def probed(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        observe(module.layer_idx, query, key, value, attention_mask, scaling)
        return attend(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None

    AttentionInterface.register(PROBE, probed)
    AttentionMaskInterface.register(PROBE, sdpa_mask)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(PROBE)
        yield
    finally:
        model.set_attn_implementation(before)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Softmax attention `[batch, heads, queries, width]`; key and value may have fewer heads (GQA).

    Without a mask, several queries attend causally; a single one is the last token and sees all.
    """
    causal = mask is None and query.shape[2] > 1
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _whole(output: Tensor) -> Tensor:
    return output
