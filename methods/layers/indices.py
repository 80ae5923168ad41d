"""Which stored tokens are kept or read, as rows of indices per head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import ops
from methods.base import Plan


def sinks_and_recent(batch: int, groups: int, sinks: int, budget: int, stored: int, device: torch.device) -> Tensor:
    """The first `sinks` and the last `budget - sinks` of `stored` tokens. -> [B G budget]"""
    rows = torch.cat([torch.arange(sinks, device=device), torch.arange(stored - budget + sinks, stored, device=device)])
    return rows.expand(batch, groups, -1)


def between_ends(middle: Tensor, plan: Plan, stored: int) -> Tensor:
    """`plan` carried out: the first tokens, `middle` [B G top] (counted from behind the sinks), the last ones.
    -> [B G budget], ascending"""
    sinks = torch.arange(plan.sinks, device=middle.device).expand(*middle.shape[:2], -1)
    local = torch.arange(stored - plan.local, stored, device=middle.device).expand(*middle.shape[:2], -1)
    return torch.cat([sinks, middle.sort(-1).values + plan.sinks, local], -1)


def gather_per_head(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of each KV head or of each query head. x [B G S D], rows [B G|H K] -> [B G|H K D]"""
    batch, groups = x.shape[:2]
    found: Tensor = ops.gather_rows(x, rows.reshape(batch, groups, -1))
    return found.view(*rows.shape, -1)


def side_by_side(x: Tensor, places: Tensor) -> Tensor:
    """x [N D], places [B G U] among the N -> [B G U D]"""
    found: Tensor = ops.gather_rows(x[None, None], places.view(1, 1, -1))
    return found.view(*places.shape, -1)


def read_together(rows: Tensor, groups: int, stored: int) -> Tensor:
    """Which of `stored` tokens the query heads of a KV head read. rows [B H K], -1 for none -> bool [B G stored]"""
    together = rows.reshape(rows.shape[0], groups, -1) % (stored + 1)  # -1: the place behind the last
    read = torch.zeros(*together.shape[:2], stored + 1, dtype=torch.bool, device=rows.device)
    return read.scatter_(2, together, True)[..., :stored]


def union_per_kv_head(rows: Tensor, groups: int, stored: int) -> Tensor:
    """What a KV head's query heads read together. rows [B H K], of `stored`, -1 for none -> [B G K'], ascending, filled
    up with -1 where another KV head's union is larger."""
    read = read_together(rows, groups, stored)
    found = torch.where(read, torch.arange(stored, device=rows.device), stored).sort(-1).values
    found = found[..., : int(read.sum(-1).max())]
    return found.masked_fill(found == stored, -1)


class Distinct(NamedTuple):
    """Rows that the query heads of each KV head read, each once."""

    heads: Tensor  # [N], of the KV heads, counted through the batch; ascending
    rows: Tensor  # [N]
    places: Tensor  # [B G U], where each KV head's stand among the N; others' where a head has fewer than U
    own: Tensor  # [B H K], where each query head's stand among its KV head's U


def distinct_rows(rows: Tensor, groups: int, stored: int) -> Distinct:
    """rows [B H K], of `stored`. Waits for the device."""
    read = read_together(rows, groups, stored)
    counts = read.sum(-1, keepdim=True)
    ends = counts.flatten().cumsum(0).view_as(counts)
    heads, found = read.flatten(0, 1).nonzero().unbind(1)
    places = torch.arange(int(counts.max()), device=rows.device)
    own = (read.cumsum(-1) - 1).gather(2, rows.reshape(*read.shape[:2], -1)).view_as(rows)
    return Distinct(heads, found, (ends - counts + places).clamp(max=len(found) - 1), own)


def ends(x: Tensor, first: int, last: int, dim: int = -1) -> Tensor:
    """The first and the last entries of a dimension."""
    size = x.shape[dim]
    tail = x.narrow(dim, max(0, size - last), min(last, size))
    return torch.cat([x.narrow(dim, 0, first), tail], dim) if first else tail
