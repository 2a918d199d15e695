"""How far an attention output is expected to be off when keys and values carry residuals of known
covariance.

To first order in residuals δk, δv of the cached rows, the output o = Σⱼ aⱼ vⱼ of a query q (scaled,
so that logits are q·kⱼ) moves by Σⱼ aⱼ (δvⱼ + (q·δkⱼ)(vⱼ − o)), because δaⱼ = aⱼ (q·δkⱼ − Σᵢ aᵢ
q·δkᵢ). With residuals of zero mean that are independent between tokens and between keys and values,
its expected square is

    E|δo|² = Σⱼ aⱼ² (tr Σ_V + qᵀ Σ_K q · |vⱼ − o|²)

over the rows that carry residuals. Σ_K is the covariance of keys *as cached*, after RoPE, averaged
over the positions of the texts it was gathered on: for a residual ε with E[εεᵀ] = C in content
space it is the mean of R_j C R_jᵀ over positions j. Frequencies that turn many times become
isotropic within their pair and lose what ties them to other pairs; slow ones, and dimensions that
RoPE leaves alone, keep C's own structure. So one matrix per head serves every position, at the
price of what a fast pair's residual prefers in content space, and of prompts much longer than those
texts.
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

    queries `[n, query heads, width]` scaled; keys, values `[tokens, heads, width]` as cached, fewer
    heads than queries under GQA, each serving neighbouring query heads; allowed `[n, tokens]`:
    which rows a query sees, at least one; uncertain `[tokens]`: which rows carry residuals; sigma_k
    `[heads, width, width]`, trace_v `[heads]`.
    """
    heads = keys.shape[1]
    q = queries.unflatten(1, (heads, -1))  # [n, heads, queries of the head, width]
    hidden = ~allowed[:, None, None]
    logits = torch.einsum("nhgw,thw->nhgt", q, keys).masked_fill(hidden, -torch.inf)
    weights = logits.softmax(-1)
    output = torch.einsum("nhgt,thv->nhgv", weights, values)

    # |vⱼ − o|² as |vⱼ|² − 2 vⱼ·o + |o|²: the differences themselves would be [n, heads, g, tokens,
    # width]. Rounding can leave a little less than nothing where a value equals the output.
    squared_output = output.square().sum(-1)
    squared_values = values.square().sum(-1).T[None, :, None]
    crossed = torch.einsum("nhgv,thv->nhgt", output, values)
    spread = (squared_values - 2 * crossed + squared_output[..., None]).clamp_min(0)

    # A stored Σ_K is symmetric but fp32, so its smallest eigenvalues may lie just below zero.
    key_variance = torch.einsum("nhgw,hwx,nhgx->nhg", q, sigma_k, q).clamp_min(0)
    row_error = trace_v[None, :, None, None] + key_variance[..., None] * spread
    # Weights enter squared because residuals of different rows are independent: their errors add up
    # as variances.
    error = (weights.square() * uncertain * row_error).sum(-1)
    return error.flatten(1), squared_output.flatten(1)
