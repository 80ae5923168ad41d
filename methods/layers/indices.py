"""Works with row numbers of stored tokens, a list of them per head, which say what is kept or
read."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import ops
from methods.base import Plan


def between_ends(middle: Tensor, plan: Plan, stored: int) -> Tensor:
    """Return the numbers of all tokens that a step reads under a plan, [B G budget], ascending: the
    first ones (sinks), the chosen ones, and the last ones. `middle` [B G top] are the chosen ones,
    counted from the end of the sinks; `stored` is the number of all tokens."""
    sinks = torch.arange(plan.sinks, device=middle.device).expand(*middle.shape[:2], -1)
    local = torch.arange(stored - plan.local, stored, device=middle.device).expand(
        *middle.shape[:2], -1
    )
    return torch.cat([sinks, middle.sort(-1).values + plan.sinks, local], -1)


def gather_per_head(x: Tensor, rows: Tensor) -> Tensor:
    """Copy chosen tokens of each head, x [B G S D], rows [B G K] or [B H K] -> [B G K D] or
    [B H K D]. With rows of query heads, each takes its tokens from its KV head."""
    batch, groups = x.shape[:2]
    return ops.gather_rows(x, rows.reshape(batch, groups, -1)).view(*rows.shape, -1)


def read_together(rows: Tensor, groups: int, stored: int) -> Tensor:
    """Return a mask [B G stored] of the tokens that at least one query head of each KV head reads.
    rows [B H K]: token numbers below `stored`, -1 for none; `groups`: the number of KV heads G."""
    # -1 becomes the place after the last
    together = rows.reshape(rows.shape[0], groups, -1) % (stored + 1)
    read = torch.zeros(*together.shape[:2], stored + 1, dtype=torch.bool, device=rows.device)
    return read.scatter_(2, together, True)[..., :stored]


def union_per_kv_head(rows: Tensor, groups: int, stored: int) -> Tensor:
    """Return the tokens that at least one query head of each KV head reads, [B G K'], ascending.
    The end is filled up with -1 where another KV head's union is larger. rows [B H K]: token
    numbers below `stored`, -1 for none; `groups`: the number of KV heads G."""
    read = read_together(rows, groups, stored)
    union = torch.where(read, torch.arange(stored, device=rows.device), stored).sort(-1).values
    union = union[..., : int(read.sum(-1).max())]
    return union.masked_fill(union == stored, -1)


def ends(x: Tensor, first: int, last: int, dim: int = -1) -> Tensor:
    """Join the `first` first and the `last` last entries of x in dimension `dim`."""
    size = x.shape[dim]
    tail = x.narrow(dim, max(0, size - last), min(last, size))
    return torch.cat([x.narrow(dim, 0, first), tail], dim) if first else tail
