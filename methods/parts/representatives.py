"""Represents blocks of keys by the mean of those that drew the most attention (InfLLM, arXiv
2402.04617)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import ops


def representatives(keys: Tensor, drawn: Tensor, block: int, top: int) -> Tensor:
    """Return per query head the mean key of the `top` tokens of each block that drew the most
    attention.

    keys [B G N*block D], drawn [B H N*block] -> [B H N D]
    """
    per_head = keys.unflatten(2, (-1, block)).repeat_interleave(drawn.shape[1] // keys.shape[1], dim=1)
    best = drawn.unflatten(2, (-1, block)).topk(top).indices
    return per_head.gather(3, best.unsqueeze(-1).expand(*best.shape, keys.shape[3])).mean(3)


def tokens_of_best(q: Tensor, means: Tensor, groups: int, block: int, tokens: int) -> Tensor:
    """Return the tokens of the best blocks for the mean query, the same for all heads: `tokens`
    tokens in all. Blocks are represented by `means` [B H N D]. q [B H T D] -> rows [B G tokens]"""
    scores = ops.row_scores(q.mean(2, keepdim=True), means).sum((1, 2))
    best = ops.top_k(scores, tokens // block).unsqueeze(1)
    rows: Tensor = ops.token_rows(best.expand(-1, groups, -1), block)
    return rows


def rotated_to(seen: Tensor, first: int, after: int) -> Tensor:
    """Return the positions by which keys of the tokens `seen` [S] are rotated: 0 in blocks, from
    `first` up to `after`, their own elsewhere."""
    return torch.where((seen >= first) & (seen < after), 0, seen)
