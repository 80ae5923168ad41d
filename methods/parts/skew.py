"""Computes InfiniGen's skew (arXiv 2406.19707), which turns queries and keys so that few columns
hold most of a query."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.lowrank import directions, gram
from methods.base.pieces import pieces


def skewing(q: Tensor, groups: int) -> Tensor:
    """Return the orthogonal A of each KV head, the strongest direction first. q [1 H T D], rotated
    -> [G D D] in fp32"""
    stacked = q[0].unflatten(0, (groups, -1)).flatten(1, 2)
    return directions(gram(stacked)).float()


def skewed(x: Tensor, skew: Tensor | None) -> Tensor:
    """Multiply x [B G T D] by A [G D D]; without a skew, return x itself."""
    return x if skew is None else x @ skew


def column_mass(x: Tensor, groups: int, skew: Tensor | None) -> Tensor:
    """Sum |x A| over all rows of a KV head, or of its query heads. x [B G|H T D] -> [B G D]
    (fp32)"""
    mass = torch.zeros(x.shape[0], groups, x.shape[3], device=x.device)
    for part in pieces(x.shape[2]):
        grouped = x[:, :, part].float().unflatten(1, (groups, -1)).flatten(2, 3)  # [B G g*t D]
        mass += skewed(grouped, skew).abs().sum(2)
    return mass


def largest(x: Tensor, count: int) -> Tensor:
    """Return which `count` entries of each row are largest. [B G D] -> bool"""
    return torch.zeros_like(x, dtype=torch.bool).scatter(-1, x.topk(count).indices, True)


def narrowed(columns: Tensor, chosen: Tensor) -> Tensor:
    """Put the chosen columns of A side by side; heads with fewer than others get columns of zeros.

    columns [B G D D], chosen [B G D] -> [B G D d']
    """
    at = chosen.int().topk(int(chosen.sum(-1).max())).indices
    return (columns * chosen.unsqueeze(2)).gather(3, at.unsqueeze(2).expand(-1, -1, columns.shape[2], -1))
