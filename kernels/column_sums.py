"""Computes how much attention each key receives, summed over queries: the scores of H2O and SnapKV.

The weights are made for a block of queries at a time, so memory is linear in the stored tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# weights of all heads together; each head still gets _LEAST_QUERIES at least
_WEIGHTS_AT_ONCE = 1 << 20
_LEAST_QUERIES = 32


def column_sums(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return how much attention each key receives: its causal softmax weights summed over the
    queries, which are the last T of S tokens.

    q [B H T D], k [B G S D] -> [B H S] (fp32)"""
    sums = q.new_zeros(*q.shape[:2], k.shape[2], dtype=torch.float32)
    for weights in _weights(q, k, scale):
        sums[..., : weights.shape[-1]] += weights.sum(2)
    return sums


def prefill_attention_with_column_sums(
    q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of the last T of S tokens together with its column sums, the
    attention that each key receives, so that the logits are computed once.

    q [B H T D], k, v [B G S D] -> [B H T D], [B H S] (fp32)"""
    batch, heads, _, dim = q.shape
    sums = q.new_zeros(batch, heads, k.shape[2], dtype=torch.float32)
    out = []
    for weights in _weights(q, k, scale):
        seen = weights.shape[-1]
        sums[..., :seen] += weights.sum(2)
        folded = weights.view(batch, v.shape[1], -1, seen)
        out.append((folded @ v[:, :, :seen].float()).view(batch, heads, -1, dim).to(v.dtype))
    return torch.cat(out, 2), sums


def _weights(q: Tensor, k: Tensor, scale: float) -> Iterator[Tensor]:
    """Yield the attention weights of blocks of queries [B H t s] (fp32), where s ends at the
    block's last query.

    The query heads of a group are folded into the token axis, so no key is repeated.
    """
    batch, heads, new, dim = q.shape
    groups, stored = k.shape[1:3]
    first = stored - new
    for block in q.split(max(_LEAST_QUERIES, _WEIGHTS_AT_ONCE // (batch * heads * stored)), dim=2):
        count = block.shape[2]
        first += count
        logits = block.reshape(batch, groups, -1, dim).float() @ k[:, :, :first].float().transpose(
            -1, -2
        )
        logits = logits.view(batch, heads, count, first).mul_(scale)
        future = torch.ones(count, count, dtype=torch.bool, device=q.device).triu_(1)
        logits[..., first - count :].masked_fill_(future, float("-inf"))
        yield logits.softmax(-1)
