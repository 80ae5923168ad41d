"""Adds the attention that each stored token receives from one query to running sums (H2O)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.common import (
    head_rows,
    located,
    padded,
    product,
    unfit,
    unfit_floats,
    unfit_heads,
    unfit_numbers,
    unfit_shape,
    unfit_sharing,
)
from kernels.ragged import Ragged, first_of

_BLOCK = 64  # tokens


def add_received(sums: Tensor, q: Tensor, k: Tensor | Ragged, lse: Tensor, scale: float, live: Tensor | None) -> None:
    """Add to sums [B G C] the attention weights that queries q [B H 1 D] give the keys k [B G S D],
    as kernels/reference.py defines it, in one pass over the keys."""
    (batch, heads, _, dim), groups, count = q.shape, k.shape[1], k.shape[2]
    counts = k.counts if isinstance(k, Ragged) else None
    first, places, aligned = located(k)
    if count:
        _receive[(triton.cdiv(count, _BLOCK), batch * groups)](
            q.contiguous(), first, places, counts, live, lse.contiguous(), sums, *first.stride()[:3],
            *sums.stride()[:2], scale, count, int(live is not None and len(live) > 1), groups, heads // groups,
            padded(heads // groups), dim, padded(dim), _BLOCK, aligned, num_warps=4,
        )  # fmt: skip


def add_received_refuses(
    sums: Tensor, q: Tensor, k: Tensor | Ragged, lse: Tensor, scale: float, live: Tensor | None
) -> str | None:
    (batch, heads, _, dim), first = q.shape, first_of(k)
    if sums.dtype != torch.float32 or sums.shape[2] < k.shape[2] or sums.stride(2) != 1:
        return f"takes sums of float32 for {k.shape[2]} tokens, got {sums.dtype} {list(sums.shape)}"
    return (
        unfit_shape(q, batch, heads, 1, dim)
        or unfit_shape(k, batch, None, None, dim)
        or unfit_shape(sums, *k.shape[:2], None)
        or unfit_shape(lse, batch, heads)
        or unfit_numbers(live, batch)
        or unfit_sharing(heads, k.shape[1])
        or unfit_heads(first)
        or unfit_floats(q, first)
        or unfit(sums, lse)
    )


@triton.jit(do_not_specialize=["count"])
def _receive(
    q, x, places, counts, live, lse, sums, xb: tl.int64, xg: tl.int64, xt: tl.int64, sb: tl.int64, sg: tl.int64, scale,
    count, EACH: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, FOLD: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Add the weights of a block of tokens, summed over a group's query heads. `lse` holds the
    log-sum-exp of each query's softmax; `live` says how many tokens there are, with one number for
    each sequence if EACH is 1, one for all if it is 0."""
    this = tl.program_id(1).to(tl.int64)
    sequence, group = this // GROUPS, this % GROUPS
    keys, apart = head_rows(x, places, sequence, group, xb, xg, xt, ALIGNED)
    if counts is not None:
        count = tl.load(counts + sequence).to(tl.int32)
    if live is not None:
        count = tl.minimum(count, tl.load(live + sequence * EACH).to(tl.int32))
    row, head, channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, FOLD), tl.arange(0, WIDE)
    real, mine, of_head = row < count, head < HEADS, this * HEADS + head
    query = tl.load(q + of_head[:, None] * DIM + channel, mask=mine[:, None] & (channel < DIM), other=0.0)
    key = tl.load(keys + row[:, None] * apart + channel, mask=real[:, None] & (channel < DIM), other=0.0)
    whole = tl.load(lse + of_head, mask=mine, other=0.0)
    weights = tl.exp(product(query, tl.trans(key)) * scale - whole[:, None])
    to = sums + sequence * sb + group * sg + row
    received = tl.sum(tl.where(mine[:, None], weights, 0.0), 0)
    tl.store(to, tl.load(to, mask=real, other=0.0) + received, mask=real)
