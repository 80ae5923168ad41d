"""Computes which stored tokens are kept or read, as rows of indices per head."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import ops
from methods.base import Plan


def between_ends(middle: Tensor, plan: Plan, stored: int) -> Tensor:
    """Return the tokens of a plan, [B G budget], ascending: the first ones, `middle` [B G top]
    (counted after the sinks), the last ones."""
    sinks = torch.arange(plan.sinks, device=middle.device).expand(*middle.shape[:2], -1)
    local = torch.arange(stored - plan.local, stored, device=middle.device).expand(*middle.shape[:2], -1)
    return torch.cat([sinks, middle.sort(-1).values + plan.sinks, local], -1)


def gather_per_head(x: Tensor, rows: Tensor) -> Tensor:
    """Copy rows of each KV head or of each query head, x [B G S D], rows [B G|H K] ->
    [B G|H K D]."""
    batch, groups = x.shape[:2]
    gathered: Tensor = ops.gather_rows(x, rows.reshape(batch, groups, -1))
    return gathered.view(*rows.shape, -1)


def read_together(rows: Tensor, groups: int, stored: int) -> Tensor:
    """Return which of `stored` tokens the query heads of a KV head read, rows [B H K], -1 for none
    -> bool [B G stored]."""
    together = rows.reshape(rows.shape[0], groups, -1) % (stored + 1)  # -1 becomes the place after the last
    read = torch.zeros(*together.shape[:2], stored + 1, dtype=torch.bool, device=rows.device)
    return read.scatter_(2, together, True)[..., :stored]


def union_per_kv_head(rows: Tensor, groups: int, stored: int) -> Tensor:
    """Return the tokens that a KV head's query heads read together, rows [B H K] of `stored`, -1
    for none -> [B G K'], ascending, filled up with -1 where another KV head's union is larger."""
    read = read_together(rows, groups, stored)
    union = torch.where(read, torch.arange(stored, device=rows.device), stored).sort(-1).values
    union = union[..., : int(read.sum(-1).max())]
    return union.masked_fill(union == stored, -1)


def first_places(rows: Tensor) -> Tensor:
    """Return for each of a head's rows the place where the same row stands first, without waiting
    for the device. rows [B G K] -> [B G K]"""
    ordered, order = rows.sort(dim=-1, stable=True)
    again = torch.cat([torch.zeros_like(order[..., :1], dtype=torch.bool), ordered[..., 1:] == ordered[..., :-1]], -1)
    begins = torch.arange(rows.shape[-1], device=rows.device).expand_as(order).masked_fill(again, 0).cummax(-1).values
    return torch.empty_like(order).scatter_(-1, order, order.gather(-1, begins))


def ends(x: Tensor, first: int, last: int, dim: int = -1) -> Tensor:
    """Join the first and the last entries of a dimension."""
    size = x.shape[dim]
    tail = x.narrow(dim, max(0, size - last), min(last, size))
    return torch.cat([x.narrow(dim, 0, first), tail], dim) if first else tail
