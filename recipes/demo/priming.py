"""The initial weights: heads that look a few tokens back, and one induction head, are put in by
hand.

From default weights a small RoPE model without biases needs thousands of steps before it copies
from its context: nothing in its input is constant, so no head can attend by position alone, and
random layers drown its embeddings. In the manner of mimetic initialisation (arXiv 2305.09828) all
embeddings share a direction, layer 0's heads attend 1, 2, 3 and 4 tokens back and write what they
find into subspaces of their own, layer 1's first head matches the current token with those that
stand one back (an induction head, arXiv 2209.11895), and values of later layers are copied. All of
it is trained on afterwards; nothing is frozen.
"""

from typing import Any

import torch
from transformers import LlamaForCausalLM

EMBEDDING_STD = 0.08
SHARED = 0.5
SHARPNESS = 6.3
FREQUENCIES = 7
WRITTEN = 0.6
MATCH = 3.3


@torch.no_grad()
def prime(model: LlamaForCausalLM) -> None:
    """Overwrite the freshly initialised weights of ``model`` in place; draws from torch's global
    generator."""
    config: Any = model.config
    width, head_dim, heads = config.hidden_size, config.head_dim, config.num_attention_heads
    group = heads // config.num_key_value_heads
    shared = torch.nn.functional.normalize(torch.randn(width), dim=0)
    embedding = model.model.embed_tokens.weight
    embedding.normal_(0.0, EMBEDDING_STD)
    embedding.addr_(embedding @ shared, shared, alpha=-1.0).add_(
        shared * SHARED * EMBEDDING_STD * width**0.5
    )
    gain = (
        WRITTEN * EMBEDDING_STD * width / head_dim**0.5
    )  # of a random output matrix of variance 1 / width
    level = width**0.5 * SHARED / (1 + SHARED**2) ** 0.5  # of the shared direction, after the norm

    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        layer.mlp.down_proj.weight.zero_()
        values, output = attention.v_proj.weight, attention.o_proj.weight
        values.normal_(0.0, width**-0.5).addr_(values @ shared, shared, alpha=-1.0)
        for head in range(heads):
            own = slice(head * head_dim, (head + 1) * head_dim)
            held = slice(head // group * head_dim, (head // group + 1) * head_dim)
            if index == 0:
                frequencies = model.model.rotary_emb.inv_freq
                attention.k_proj.weight[held] = (
                    torch.outer(_wave(head_dim, frequencies, 0), shared) / level
                )
                attention.q_proj.weight[own] = (
                    torch.outer(_wave(head_dim, frequencies, -1 - head), shared) / level
                )
                output[:, own].normal_(0.0, width**-0.5)
            else:
                output[:, own] = values[held].T
            output[:, own] *= gain / width**0.5

    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    half, quarter = head_dim // 2, head_dim // 4
    slow = torch.cat(
        [torch.arange(quarter, half), torch.arange(half + quarter, head_dim)]
    )  # barely rotated
    read = first.o_proj.weight[:, : len(slow)].T * width**0.5 / gain
    second.q_proj.weight[: group * head_dim].zero_()
    second.k_proj.weight[:head_dim].zero_()
    second.q_proj.weight[slow] = MATCH * first.v_proj.weight[: len(slow)]
    second.k_proj.weight[slow] = MATCH * read


def _wave(head_dim: int, frequencies: torch.Tensor, shift: int) -> torch.Tensor:
    """A vector that scores sum_f s^2 cos(f (j - i - shift)) when one of shift 0 at j is its rotated
    key."""
    wave, half = torch.zeros(head_dim), head_dim // 2
    used = slice(0, FREQUENCIES)
    wave[used] = SHARPNESS * (frequencies[used] * shift).cos()
    wave[half : half + FREQUENCIES] = SHARPNESS * (frequencies[used] * shift).sin()
    return wave
