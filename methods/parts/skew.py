"""Computes InfiniGen's skew (arXiv 2406.19707), which turns queries and keys so that few columns hold most of a
query."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.lowrank import directions, gram


def skewing(q: Tensor, groups: int) -> Tensor:
    """Return the orthogonal A of each KV head, the strongest direction first. q [1 H T D], rotated -> [G D D] in
    fp32"""
    stacked = q[0].unflatten(0, (groups, -1)).flatten(1, 2)
    return directions(gram(stacked)).float()


def largest(x: Tensor, count: int) -> Tensor:
    """Say which `count` entries of each row are largest. [B G D] -> bool"""
    return torch.zeros_like(x, dtype=torch.bool).scatter(-1, x.topk(count).indices, True)


def narrowed(columns: Tensor, chosen: Tensor) -> Tensor:
    """Put the chosen columns of A side by side; heads with fewer than others get columns of zeros.

    columns [B G D D], chosen [B G D] -> [B G D d']
    """
    at = chosen.int().topk(int(chosen.sum(-1).max())).indices
    return (columns * chosen.unsqueeze(2)).gather(3, at.unsqueeze(2).expand(-1, -1, columns.shape[2], -1))
