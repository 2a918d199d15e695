"""How far an attention output is expected to be off when keys and values carry residuals of known covariance.

To first order in residuals δk, δv of the cached rows, the output o = Σⱼ aⱼ vⱼ of a query q (scaled, so that logits are
q·kⱼ) moves by Σⱼ aⱼ (δvⱼ + (q·δkⱼ)(vⱼ − o)), because δaⱼ = aⱼ (q·δkⱼ − Σᵢ aᵢ q·δkᵢ). With residuals of zero mean that are
independent between tokens and between keys and values, its expected square is

    E|δo|² = Σⱼ aⱼ² (tr Σ_V + qᵀ Σ_K q · |vⱼ − o|²)

over the rows that carry residuals. Σ_K is the covariance of keys *as cached*, after RoPE, averaged over the positions of
the texts it was gathered on: for a residual ε with E[εεᵀ] = C in content space it is the mean of R_j C R_jᵀ over
positions j. Frequencies that turn many times become isotropic within their pair and lose what ties them to other pairs;
slow ones, and dimensions that RoPE leaves alone, keep C's own structure. So one matrix per head serves every position,
at the price of what a fast pair's residual prefers in content space, and of prompts much longer than those texts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expected_error(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    allowed: Tensor,
    uncertain: Tensor,
    sigma_k: Tensor,
    trace_v: Tensor,
) -> tuple[Tensor, Tensor]:
    """(E|δo|², |o|²), each `[n, query heads]`.

    queries `[n, query heads, width]` scaled; keys, values `[tokens, heads, width]` as cached, fewer heads than queries
    under GQA, each serving neighbouring query heads; allowed `[n, tokens]`: which rows a query sees, at least one;
    uncertain `[tokens]`: which rows carry residuals; sigma_k `[heads, width, width]`, trace_v `[heads]`.
    """
    heads = keys.shape[1]
    q = queries.unflatten(1, (heads, -1))
    logits = torch.einsum("nhgw,thw->nhgt", q, keys).masked_fill(
        ~allowed[:, None, None], -torch.inf
    )
    weights = logits.softmax(-1)
    output = torch.einsum("nhgt,thv->nhgv", weights, values)
    squared = output.square().sum(-1)
    crossed = torch.einsum("nhgv,thv->nhgt", output, values)
    spread = (
        values.square().sum(-1).T[None, :, None] - 2 * crossed + squared[..., None]
    ).clamp_min(0)
    turned = torch.einsum("nhgw,hwx,nhgx->nhg", q, sigma_k, q).clamp_min(0)
    each = trace_v[None, :, None, None] + turned[..., None] * spread
    error = (weights.square() * uncertain * each).sum(-1)
    return error.flatten(1), squared.flatten(1)
